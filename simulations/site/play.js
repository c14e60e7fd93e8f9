// One row of a target q and of a draft p: what a rule emits, drawn. No network, nothing is kept.
"use strict";
const Play = (() => {
  const each = (n, f) => Array.from({ length: n }, (_, i) => f(i));
  const sum = (xs) => xs.reduce((a, b) => a + b, 0);
  const unit = (xs) => xs.map((x) => x / sum(xs));
  const STEPS = 200; // of every bisection: more than the bits of a number

  function random(seed) { // mulberry32
    return () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
    };
  }
  const normal = (draw) => Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());

  function rows(seed, noise, count = 12) { // q by rank and chance; p is q times e^(noise · normal)
    const draw = random(seed), high = each(count, () => normal(draw)), off = each(count, () => normal(draw));
    const q = unit(high.map((x) => Math.exp(1.2 * x)));
    return { q, p: unit(q.map((x, i) => x * Math.exp(noise * off[i]))) };
  }

  function measured(h, q, p) {
    return {
      h,
      acceptance: sum(h.map((x, i) => Math.min(x, p[i]))),
      kl: Math.max(0, sum(h.map((x, i) => (x > 0 ? x * Math.log(x / q[i]) : 0)))),
      raised: Math.max(...h.map((x, i) => x / q[i])),
    };
  }

  // h = clip(p, max(a, c) q, min(b, C) q), b/a = e^(1/price), Σh = 1: one root in ln a
  function band(q, p, price, head = 0, held = []) {
    const top = Math.max(...q), keep = q.map((_, i) => held.includes(i));
    const ceiling = q.map((x, i) => (keep[i] || x < head * top ? 1 : Infinity));
    const edges = (lnA) => {
      const a = Math.exp(lnA), b = Math.exp(lnA + 1 / price);
      const lower = q.map((x, i) => (keep[i] ? 1 : a) * x);
      const upper = q.map((x, i) => Math.min(b, ceiling[i]) * x);
      return { a, b, lower, upper, h: p.map((x, i) => Math.min(Math.max(x, lower[i]), upper[i])) };
    };
    let [low, high] = [-1 / price, 0];
    for (let step = 0; step < STEPS; step++) {
      const middle = (low + high) / 2;
      if (sum(edges(middle).h) < 1) low = middle; else high = middle;
    }
    const { h, ...found } = edges(high);
    return { price, ...found, ...measured(h, q, p) };
  }

  function cactus(q, p, delta) { // accept n with γ/p_n; recover from (s q − p)₊, s = (1 − γ)/(1 − q_n)
    const gamma = q.map((x) => Math.min(1, x + Math.sqrt(2 * delta * x * (1 - x))));
    const h = p.map((x, i) => Math.min(x, gamma[i]));
    p.forEach((x, n) => {
      if (x <= gamma[n]) return;
      const left = q.map((y, i) => Math.max(0, ((1 - gamma[n]) / (1 - q[n])) * y - p[i]));
      left.forEach((y, i) => { h[i] += (x - gamma[n]) * y / sum(left); });
    });
    return measured(h, q, p);
  }

  function lenience(q, p, ell) { // accept n with q_n/(ℓ p_n); recover from (q − p)₊
    const taken = p.map((x, i) => Math.min(x, q[i] / ell)), left = q.map((x, i) => Math.max(0, x - p[i]));
    const lost = 1 - sum(taken), total = sum(left);
    return measured(taken.map((x, i) => x + (total > 0 ? lost * left[i] / total : 0)), q, p);
  }

  // the knob, between strict and loose on a scale of logarithms, at which a rule spends the nats
  function spending(rule, nats, strict, loose) {
    let [low, high] = [Math.log(strict), Math.log(loose)];
    if (rule(loose).kl <= nats) return { knob: loose, ...rule(loose) };
    for (let step = 0; step < STEPS; step++) {
      const middle = (low + high) / 2;
      if (rule(Math.exp(middle)).kl <= nats) low = middle; else high = middle;
    }
    return { knob: Math.exp(low), ...rule(Math.exp(low)) };
  }
  const RANGES = { band: [1e3, 1e-4], cactus: [1e-12, 1e3], lenience: [1, 1e-9] };

  function drawn(row, draw) { // the index at which the running sum passes a coin
    const coin = draw() * sum(row);
    let below = 0;
    return row.findIndex((x, i) => (below += x) > coin && row[i] > 0);
  }
  function emit(law, p, draw) { // draft, coin, and what is emitted in the end
    const drafted = drawn(p, draw), chance = Math.min(1, law.h[drafted] / p[drafted]), coin = draw();
    const kept = coin < chance;
    return { drafted, chance, coin, kept,
      token: kept ? drafted : drawn(law.h.map((x, i) => Math.max(0, x - p[i])), draw) };
  }
  return { rows, band, cactus, lenience, spending, measured, emit, random, RANGES, each, sum };
})();

// The picture. Every control is read, every number computed, and all of it drawn again.
function play(root) {
  const NAMES = ["the", "moon", "rose", "and", "sang", "over", "cold", "hills", "then", "slept", "on", "."];
  const find = (name) => root.querySelector(`[data-play="${name}"]`);
  const state = { seed: 5, held: [], counts: null, coins: Play.random(1) };
  const number = (x) => (x >= 100 || x === 0 ? x.toFixed(0) : x.toPrecision(3));

  function read() {
    const { q, p } = Play.rows(state.seed, Number(find("noise").value));
    const budget = find("by").value === "delta", knob = 10 ** Number(find(budget ? "delta" : "price").value);
    const head = Number(find("head").value), at = (price) => Play.band(q, p, price, head, state.held);
    find("delta").parentElement.hidden = !budget;
    find("price").parentElement.hidden = budget;
    const price = budget ? Play.spending(at, knob, ...Play.RANGES.band).knob : knob;
    return { q, p, law: at(price) };
  }

  function picture({ q, p, law }) {
    const width = 500, height = 280, base = 240, slot = width / q.length;
    const most = Math.max(...q, ...p, ...law.h) * 1.05, y = (x) => base - (base - 12) * Math.min(1, x / most);
    const bar = (at, wide, from, to, fill, more = "") =>
      `<rect x="${at}" y="${y(to)}" width="${wide}" height="${Math.max(0, y(from) - y(to))}" fill="${fill}" ${more}/>`;
    const token = (i) => {
      const left = i * slot, held = state.held.includes(i), seen = state.counts && state.counts[i] / Play.sum(state.counts);
      return `<g data-token="${i}" style="cursor:pointer"><title>${NAMES[i]}: q ${number(q[i])}, p ${number(p[i])}, h ${number(law.h[i])}</title>
        <rect x="${left}" y="0" width="${slot}" height="${height}" fill="transparent"/>
        ${bar(left + 4, slot - 8, law.lower[i], Math.min(law.upper[i], most), "#56B4E9", 'opacity=".3"')}
        ${bar(left + 9, slot / 2 - 10, 0, p[i], "#bdbdbd")}${bar(left + slot / 2 + 1, slot / 2 - 10, 0, law.h[i], "#0072B2")}
        ${bar(left + 4, slot - 8, q[i], q[i] + most / 180, "#222222")}
        ${state.counts ? `<circle cx="${left + slot * 0.75 - 3}" cy="${y(seen)}" r="4" fill="#ffffff" stroke="#882255" stroke-width="2"/>` : ""}
        <text x="${left + slot / 2}" y="${base + 18}" text-anchor="middle" font-size="13" font-weight="${held ? 700 : 400}" fill="currentColor">${NAMES[i]}</text>
        ${held ? `<text x="${left + slot / 2}" y="${base + 35}" text-anchor="middle" font-size="13" fill="#0072B2">held</text>` : ""}</g>`;
    };
    find("picture").innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="100%" role="img"
      aria-label="Bars of target, draft and emitted law of twelve tokens">${Play.each(q.length, token).join("")}
      <line x1="0" x2="${width}" y1="${base}" y2="${base}" stroke="currentColor"/></svg>`;
    for (const group of root.querySelectorAll("[data-token]")) group.onclick = () => hold(Number(group.dataset.token));
  }

  function table({ q, p, law }) {
    const { cactus, lenience, spending, measured, RANGES } = Play;
    const rules = [
      ["lossless", "", measured(q, q, p), "#222222"],
      ["Cactus", "δ", spending((x) => cactus(q, p, x), law.kl, ...RANGES.cactus), "#D55E00"],
      ["lenience", "ℓ", spending((x) => lenience(q, p, x), law.kl, ...RANGES.lenience), "#6b6b6b"],
      ["band", "price", { knob: law.price > 1e-4 ? law.price : 0, ...law }, "#0072B2"],
    ];
    const line = ([name, knob, of, colour]) => `<tr><td>${name}</td><td>${knob && `${knob} ${number(of.knob)}`}</td>
      <td><span style="display:inline-block;height:.7em;width:${3 * of.acceptance}em;background:${colour}"></span> ${of.acceptance.toFixed(3)}</td>
      <td>${of.kl.toFixed(4)}</td><td>${of.raised.toFixed(2)}</td></tr>`;
    find("table").innerHTML = `<table class="play-rows"><tr><th>rule</th><th>knob</th><th>acceptance</th><th>KL, nats</th>
      <th>max h/q</th></tr>${rules.map(line).join("")}</table>`;
    find("edges").textContent = `Band: a = ${number(law.a)}, b = ${law.b > 1e4 ? "∞" : number(law.b)}; price ${law.price > 1e-4 ? number(law.price) : "0, as more cannot be spent"}.`;
  }

  function show() {
    const now = read();
    picture(now);
    table(now);
    return now;
  }
  function changed() { state.counts = null; find("said").textContent = ""; show(); }
  function hold(i) {
    state.held = state.held.includes(i) ? state.held.filter((own) => own !== i) : [...state.held, i];
    changed();
  }
  function draw(times) {
    const { p, law } = read();
    state.counts = state.counts || p.map(() => 0);
    let one;
    for (let time = 0; time < times; time++) { one = Play.emit(law, p, state.coins); state.counts[one.token]++; }
    const judged = one.kept ? "accepted" : `rejected; recovered: “${NAMES[one.token]}”`;
    find("said").textContent = `The draft proposes “${NAMES[one.drafted]}”, chance of acceptance ` +
      `${one.chance.toFixed(3)}, coin ${one.coin.toFixed(3)}: ${judged}. ${Play.sum(state.counts)} drawn (circles).`;
    show();
  }
  for (const name of ["noise", "by", "price", "delta", "head"]) find(name).oninput = changed;
  find("rows").onclick = () => { state.seed++; state.held = []; changed(); };
  find("one").onclick = () => draw(1);
  find("many").onclick = () => draw(1000);
  show();
}
const playground = typeof document === "undefined" ? null : document.getElementById("play");
if (playground) play(playground);
