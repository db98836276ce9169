// Draws the dial: two panels, the slider, the readout, and the question that comes first.
(() => {
  "use strict";
  const find = (id) => document.getElementById(id);
  const draw = (parent, tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const fixed = (x, digits = 3) => (x < 0 && Number(x.toFixed(digits)) !== 0 ? "\u2212" : "") + Math.abs(x).toFixed(digits);

  const W = 420, H = 300, LEFT = 44, RIGHT = 12, TOP = 14, BOTTOM = 44;
  const axes = (svg, xs, ys, yTicks, yFormat) => {
    for (const tick of yTicks) {
      draw(svg, "line", {x1: LEFT, x2: W - RIGHT, y1: ys(tick), y2: ys(tick), class: tick === 0 ? "zero" : "grid"});
      draw(svg, "text", {x: LEFT - 7, y: ys(tick) + 4, class: "tick end"}, yFormat(tick));
    }
  };

  // ---- left: the reference reweighted ---------------------------------------------------------
  const left = find("bars"), barY = (p) => TOP + (1 - p) * (H - TOP - BOTTOM);
  axes(left, null, barY, [0, 0.25, 0.5, 0.75, 1], (t) => t.toString());
  const bandWidth = (W - LEFT - RIGHT) / 3;
  const bars = dial.names.map((name, i) => {
    const x = LEFT + i * bandWidth + 16, width = (bandWidth - 38) / 2;
    draw(left, "rect", {x, width, y: barY(dial.ref[i]), height: barY(0) - barY(dial.ref[i]), class: "ref"});
    draw(left, "text", {x: x + width / 2, y: barY(dial.ref[i]) - 5, class: "tick"}, dial.ref[i].toFixed(2));
    draw(left, "text", {x: x + width + 3, y: H - BOTTOM + 18, class: "name"}, name);
    const bar = draw(left, "rect", {x: x + width + 6, width, class: "optimal"});
    return {bar, label: draw(left, "text", {x: x + width * 1.5 + 6, class: "tick"})};
  });

  // ---- right: both rewards against drift ------------------------------------------------------
  const right = find("curves"), most = 4.7;
  const x = (kl) => LEFT + (kl / most) * (W - LEFT - RIGHT), y = (r) => TOP + ((2.1 - r) / 3.2) * (H - TOP - BOTTOM);
  axes(right, x, y, [-1, 0, 1, 2], (t) => (t < 0 ? "\u2212" : "") + Math.abs(t));
  for (const tick of [0, 1, 2, 3, 4]) draw(right, "text", {x: x(tick), y: H - BOTTOM + 18, class: "tick"}, tick);
  draw(right, "text", {x: (LEFT + W - RIGHT) / 2, y: H - 6, class: "title"}, "drift: KL from the reference (nats)");
  const path = dial.path();
  const line = (key) => "M" + path.map((s) => `${x(s.kl).toFixed(2)},${y(s[key]).toFixed(2)}`).join("L");
  draw(right, "path", {d: line("proxy"), class: "line proxy"});
  const goldParts = draw(right, "g", {class: "gold-parts"});
  draw(goldParts, "path", {d: line("gold"), class: "line gold"});
  const best = dial.peak();
  draw(goldParts, "line", {x1: x(best.kl), x2: x(best.kl), y1: y(best.gold) + 6, y2: y(-0.3), class: "pointer"});
  draw(goldParts, "text", {x: x(best.kl) - 4, y: y(-0.3) + 14, class: "note"}, `gold peaks, β ${best.beta.toFixed(2)}`);
  const question = draw(right, "text", {x: x(2.3), y: y(-0.45), class: "question"}, "gold: predict first");
  const dots = {proxy: draw(right, "circle", {r: 6, class: "proxy"}), gold: draw(goldParts, "circle", {r: 6, class: "gold"})};

  // ---- the slider: logarithmic, beta in steps of 0.01 -----------------------------------------
  const slider = find("beta"), number = find("beta-number");
  slider.min = Math.log(dial.LOW); slider.max = Math.log(dial.HIGH);
  let beta = 1, predicted = false;

  const update = () => {
    const now = dial.solve(beta);
    bars.forEach(({bar, label}, i) => {
      bar.setAttribute("y", barY(now.pi[i])); bar.setAttribute("height", barY(0) - barY(now.pi[i]));
      label.setAttribute("y", barY(now.pi[i]) - 5); label.textContent = now.pi[i].toFixed(2);
    });
    for (const key of ["proxy", "gold"]) {
      dots[key].setAttribute("cx", x(now.kl)); dots[key].setAttribute("cy", y(now[key]));
    }
    slider.setAttribute("aria-valuetext", "beta " + beta.toFixed(2));
    find("at-beta").textContent = beta.toFixed(2);
    find("at-proxy").textContent = fixed(now.proxy);
    find("at-gold").textContent = predicted ? fixed(now.gold) : "predict first";
    find("at-kl").textContent = fixed(now.kl);
    left.setAttribute("aria-label", "Probabilities of the optimal policy: " + dial.names.map((n, i) => `${n} ${now.pi[i].toFixed(3)}`).join(", "));
  };
  const set = (value) => {
    beta = Math.min(dial.HIGH, Math.max(dial.LOW, Math.round(value * 100) / 100));
    update();
  };
  slider.addEventListener("input", () => { set(Math.exp(slider.valueAsNumber)); number.value = beta.toFixed(2); });
  number.addEventListener("change", () => {
    if (Number.isFinite(number.valueAsNumber)) set(number.valueAsNumber);
    number.value = beta.toFixed(2); slider.value = Math.log(beta);
  });

  // ---- predict first --------------------------------------------------------------------------
  const below = dial.fallsTo(dial.start), zero = dial.fallsTo(0), [flatLow, flatHigh] = dial.flat();
  const truth = `Gold rises from ${fixed(dial.start, 2)} to ${fixed(best.gold)} at β = ${best.beta.toFixed(3)} ` +
    `(so flat a peak that every β from ${flatLow.toFixed(2)} to ${flatHigh.toFixed(2)} shows ${fixed(best.gold)}), then falls: ` +
    `below where it started once β < ${below.beta.toFixed(4)} (drift above ${below.kl.toFixed(3)} nats), ` +
    `below zero once β < ${zero.beta.toFixed(4)}. The reward-model score rises all the way and never says so.`;
  const reveal = (verdict) => {
    predicted = true;
    document.body.classList.add("revealed");
    question.textContent = "";
    find("answer").textContent = verdict + truth;
    update();
  };
  for (const choice of document.querySelectorAll("input[name=prediction]")) {
    choice.addEventListener("change", () => reveal(choice.value === "peaks" ? "Yes. " : "Not quite. "));
  }
  find("show").addEventListener("click", () => reveal(""));
  if (window.location.hash === "#revealed") reveal("");
  slider.value = Math.log(beta); number.value = beta.toFixed(2);
  update();
})();
