// The mathematics of the dial: pi*(y) = ref(y) exp(r(y)/beta) / Z (Eq. 8), its expected rewards, and its drift (Eq. 1).
const dial = (() => {
  "use strict";
  const names = ["A: plain", "B: better", "C: exploit"];
  const ref = [0.80, 0.19, 0.01], proxy = [0, 1, 2], gold = [0, 1, -1];
  const LOW = 0.1, HIGH = 10;

  const solve = (beta) => {
    const top = Math.max(...proxy);                      // taken out before exp, put back into log Z
    const weights = ref.map((p, i) => p * Math.exp((proxy[i] - top) / beta));
    const total = weights.reduce((a, b) => a + b, 0);
    const pi = weights.map((w) => w / total);
    const mean = (values) => pi.reduce((sum, p, i) => sum + p * values[i], 0);
    return {
      beta, pi, logZ: Math.log(total) + top / beta, proxy: mean(proxy), gold: mean(gold),
      kl: pi.reduce((sum, p, i) => sum + (p > 0 ? p * Math.log(p / ref[i]) : 0), 0),
    };
  };

  // 121 points, evenly spaced in log beta, from 10 down to 0.1.
  const path = () => Array.from({length: 121}, (_, i) => solve(10 ** (1 - i / 60)));

  // Where gold is highest: golden-section search over log beta (gold has one peak there).
  const peak = () => {
    const shrink = (Math.sqrt(5) - 1) / 2;
    let a = Math.log(LOW), b = Math.log(HIGH);
    while (b - a > 1e-9) {
      const c = b - shrink * (b - a), d = a + shrink * (b - a);
      if (solve(Math.exp(c)).gold > solve(Math.exp(d)).gold) b = d; else a = c;
    }
    return solve(Math.exp((a + b) / 2));
  };

  // Below the peak's beta, where gold falls through a level: bisection over log beta.
  const fallsTo = (level) => {
    let a = Math.log(LOW), b = Math.log(peak().beta);
    for (let i = 0; i < 80; i++) {
      const middle = (a + b) / 2;
      if (solve(Math.exp(middle)).gold < level) a = middle; else b = middle;
    }
    return solve(Math.exp((a + b) / 2));
  };

  // The betas on the slider (steps of 0.01) that show the same gold as the peak, to three decimals.
  const flat = () => {
    const best = peak().gold.toFixed(3);
    const same = [];
    for (let i = 10; i <= 1000; i++) if (solve(i / 100).gold.toFixed(3) === best) same.push(i / 100);
    return [same[0], same[same.length - 1]];
  };

  const start = gold.reduce((sum, g, i) => sum + ref[i] * g, 0);   // gold of the reference itself
  return {names, ref, start, LOW, HIGH, solve, path, peak, fallsTo, flat};
})();
