// Draws the charts and the samples of a report. All text from models enters through textContent alone.
(() => {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);

  // ---- charts ---------------------------------------------------------------------------------
  const font = getComputedStyle(document.documentElement).getPropertyValue("--sans").trim();
  const soft = "var(--ink-soft)", rule = "var(--rule)";
  const config = {
    background: "transparent", font,
    view: {stroke: null},
    axis: {labelColor: soft, titleColor: soft, gridColor: rule, domainColor: rule, tickColor: rule,
           labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal", titlePadding: 6, labelFlush: false},
    axisX: {grid: false},
  };
  const options = {mode: "vega-lite", renderer: "svg", actions: false, ast: true, config,
                   tooltip: {disableDefaultStyle: true}};

  for (const holder of document.querySelectorAll("[data-chart]")) {
    vegaEmbed(holder, read(holder.dataset.chart), options).catch((error) => {
      holder.textContent = "This chart could not be drawn: " + error.message;
    });
  }

  // ---- tokens coloured by log-ratio -----------------------------------------------------------
  const CAP = 3;                                          // nats; stronger log-ratios have the full colour
  const colour = (ratio) => {
    const strength = Math.min(1, Math.abs(ratio) / CAP) ** 0.7;
    return `color-mix(in srgb, var(${ratio < 0 ? "--less" : "--more"}) ${(78 * strength).toFixed(1)}%, transparent)`;
  };
  const signed = (x, digits = 2) => (x === null ? "–" : (x < 0 ? "\u2212" : "+") + Math.abs(x).toFixed(digits));
  const plain = (x, digits = 2) => (x === null ? "–" : (x < 0 ? "\u2212" : "") + Math.abs(x).toFixed(digits));
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const shown = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
  const quoted = (text) => "“" + text.replaceAll("\n", "↵").replaceAll("\t", "⇥") + "”";
  const describe = ([text, logp, ref, kl]) => {
    const ratio = logp === null || ref === null ? null : logp - ref;
    return `${quoted(text)}  log-ratio ${signed(ratio)}  (policy ${plain(logp)}, reference ${plain(ref)}` +
           (kl === null ? ")" : `; exact KL here ${plain(kl)})`);
  };

  const tip = document.getElementById("tip");
  const showTip = (token) => {
    tip.textContent = describe(token.values);
    tip.hidden = false;
    const box = token.getBoundingClientRect(), width = tip.offsetWidth;
    const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8));
    const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.left = left + scrollX + "px";
    tip.style.top = (below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + scrollY + "px";
  };
  const hideTip = () => { tip.hidden = true; };

  // A response is one tab stop; arrow keys walk through its tokens, and each is announced with its numbers.
  const drawTokens = (sample) => {
    const holder = make("p", "response");
    holder.dir = "auto";
    if (!sample.tokens) { holder.textContent = shown(sample.text); return holder; }
    holder.tabIndex = 0;
    holder.setAttribute("role", "application");
    holder.setAttribute("aria-label", "Response: " + sample.text + " (arrow keys read the tokens)");
    const tokens = sample.tokens.map((values) => {
      const token = make("span", "token", shown(values[0]));
      token.values = values;
      if (values[1] !== null && values[2] !== null) token.style.background = colour(values[1] - values[2]);
      token.addEventListener("mouseenter", () => showTip(token));
      token.addEventListener("mouseleave", hideTip);
      holder.append(token);
      return token;
    });
    let at = -1;
    const select = (next) => {
      if (at >= 0) tokens[at].classList.remove("current");
      at = next;
      if (at >= 0) { tokens[at].classList.add("current"); showTip(tokens[at]); } else hideTip();
    };
    holder.addEventListener("keydown", (event) => {
      const rtl = getComputedStyle(holder).direction === "rtl" ? -1 : 1;
      const move = {ArrowRight: rtl, ArrowLeft: -rtl, Home: -tokens.length, End: tokens.length}[event.key];
      if (event.key === "Escape") select(-1);
      if (move === undefined) return;
      event.preventDefault();
      select(Math.max(0, Math.min(tokens.length - 1, at + move)));
    });
    holder.addEventListener("blur", () => select(-1));
    holder.addEventListener("click", (event) => {
      const index = tokens.indexOf(event.target);
      if (index >= 0) select(index);
    });
    return holder;
  };

  const drawSample = (sample) => {
    const box = make("div", "sample");
    box.append(drawTokens(sample));
    const facts = [];
    if (sample.reward !== undefined) facts.push("reward " + plain(sample.reward));
    if (sample.gold !== undefined) facts.push("gold " + plain(sample.gold));
    if (sample.tokens && sample.tokens.every((t) => t[1] !== null && t[2] !== null))
      facts.push("log-ratio " + signed(sample.tokens.reduce((sum, t) => sum + t[1] - t[2], 0), 1));
    if (sample.ended === false) facts.push("did not end");
    box.append(make("p", "facts", facts.join(" · ")));
    return box;
  };

  // ---- samples side by side -------------------------------------------------------------------
  const viewer = document.getElementById("samples-viewer");
  if (!viewer) return;
  const {columns, groups, most} = read("samples-data");
  const list = viewer.querySelector(".groups"), count = viewer.querySelector(".count");
  const search = viewer.querySelector("#samples-search"), pick = viewer.querySelector("#samples-pick");
  const which = viewer.querySelector("#samples-which"), more = viewer.querySelector(".more");
  const PAGE = 5;
  let limit = PAGE;

  groups.forEach((group, index) => pick.append(new Option(`${index + 1}. ${group.prompt.slice(0, 70)}`, index)));
  for (let k = 0; k < most; k++) which.append(new Option(`sample ${k + 1}`, k));
  if (most > 1) which.append(new Option("all samples", "all"));
  which.closest("label").hidden = most < 2;

  const haystacks = groups.map((group) =>
    [group.prompt, ...group.cells.flat().map((sample) => sample.text)].join("\n").toLowerCase());

  const drawGroup = (group, number) => {
    const article = make("article", "group");
    const heading = make("h3", "prompt");
    heading.append(make("span", "number", number + 1), Object.assign(make("span", "", group.prompt), {dir: "auto"}));
    const grid = make("div", "columns");
    grid.style.setProperty("--columns", columns.length);
    columns.forEach((column, index) => {
      const cell = make("section", "cell");
      cell.style.setProperty("--series", `var(--c${column.colour % 8})`);
      cell.append(make("h4", "policy", column.label));
      const samples = group.cells[index];
      const chosen = which.value === "all" ? samples : samples.slice(+which.value, +which.value + 1);
      if (!chosen.length) cell.append(make("p", "facts", "no sample"));
      chosen.forEach((sample) => cell.append(drawSample(sample)));
      grid.append(cell);
    });
    article.append(heading, grid);
    return article;
  };

  const draw = () => {
    const words = search.value.trim().toLowerCase();
    const found = groups.map((_, index) => index)
      .filter((index) => (pick.value === "" || +pick.value === index) && haystacks[index].includes(words));
    list.replaceChildren(...found.slice(0, limit).map((index) => drawGroup(groups[index], index)));
    count.textContent = found.length === groups.length ? `${found.length} prompts` : `${found.length} of ${groups.length} prompts`;
    more.hidden = found.length <= limit;
    more.textContent = `Show ${Math.min(10, found.length - limit)} more`;
  };
  const restart = () => { limit = PAGE; draw(); };
  search.addEventListener("input", restart);
  pick.addEventListener("change", restart);
  which.addEventListener("change", draw);
  more.addEventListener("click", () => { limit += 10; draw(); });

  const legend = viewer.querySelector(".scale-bar");
  const stops = Array.from({length: 13}, (_, i) => colour(((i - 6) / 6) * CAP));
  legend.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  draw();
})();
