// Tables, tiles, bars and the timeline.
import { clock, el, percent, rate, seconds, setText, size, whole, withoutDomain } from "./format.js";

const FEW = 12; // rows before a list is truncated
const PARTS = [["compute", "computes"], ["straggler", "waits for the slowest rank"], ["network", "waits for the network"], ["view", "waits while ranks join or leave"]];

// Nodes are replaced only if their content has changed, so that selection and scroll position survive.
export function renew(node, key, make) {
  const text = JSON.stringify(key);
  if (node.dataset.key === text) return;
  node.dataset.key = text;
  node.replaceChildren(...make());
}

export function showVerdict(data) {
  const [first, ...others] = data.verdict;
  const box = document.getElementById("verdict");
  box.dataset.level = first.level;
  setText(document.getElementById("sentence"), `${first.text}.`);
  const remedy = document.getElementById("remedy");
  remedy.hidden = !first.remedy;
  setText(remedy, first.remedy ? `${first.remedy[0].toUpperCase()}${first.remedy.slice(1)}.` : "");
  const also = document.getElementById("also");
  also.hidden = !others.length;
  renew(also, others, () => others.map((each) => el("li", { "data-level": each.level }, `${each.text}${each.remedy ? `: ${each.remedy}` : ""}.`)));
}

export function showTiles(data) {
  const { cost, job } = data;
  if (!Object.keys(job).length) return renew(document.getElementById("tiles"), 0, () => []);
  const drift = data.ranks.filter((each) => each.pair_drift !== null && each.pair_bound).map((each) => each.pair_drift / each.pair_bound);
  const worst = drift.length ? drift.reduce((sum, each) => sum + each, 0) / drift.length : null;
  const running = data.ranks.filter((each) => each.state === "running").length;
  const level = (value, warn, bad) => (value === null ? "" : value >= bad ? "bad" : value >= warn ? "warn" : "");
  const tiles = [
    ["Steps", whole(job.step === null ? null : job.step + 1), data.state === "running" ? `${running} of ${data.ranks.length} ranks run` : `${data.ranks.length} ranks`, ""],
    ["A step takes", seconds(cost.step_s || null), data.state === "running" ? "last 30 s" : "whole run", ""],
    ["Network costs", percent(cost.network_share), "of a step is waiting", level(cost.network_share, 0.25, 0.5)],
    ["A slow rank costs", percent(cost.straggler_share), data.slowest === null || cost.straggler_share < 0.005 ? "none is waited for" : `rank ${data.slowest} is waited for`, level(cost.straggler_share, 0.1, 0.2)],
    ["Links lose", percent(cost.link_loss), `${percent(cost.lost)} after repair`, level(cost.link_loss, 0.01, 0.2)],
    ["Link in use", cost.line_share === null ? rate(cost.sent) : percent(Math.min(1, cost.line_share)), cost.line_share === null ? "per rank, no limit" : `${rate(cost.sent)} of ${rate(cost.line)}`, ""],
    ["Batch that counts", percent(cost.effective_batch), cost.more_steps === null ? "" : cost.more_steps < 5e-4 ? "loss costs no extra steps" : `${percent(cost.more_steps)} more steps`, ""],
    ["Drift over bound", worst === null ? "–" : percent(worst), worst === null ? "not measured" : "between replicas", level(worst, 1.2, 1.5)],
  ];
  renew(document.getElementById("tiles"), tiles, () => tiles.map(([name, value, about, level]) =>
    el("div", { class: "tile", "data-level": level }, el("dt", {}, name), el("dd", { class: "value" }, value), el("dd", { class: "about" }, about))));
}

export function showWorst(data) {
  const rows = data.worst.slice(0, Math.max(8, Math.min(13, data.ranks.length + 1)));
  const most = Math.max(0.01, ...rows.map((each) => each.loss ?? 0));
  const blamed = new Set((data.verdict[0].links || []).map((link) => link.join()));
  renew(document.getElementById("worst"), [rows, [...blamed]], () => {
    if (!rows.length) return [el("tbody", {}, el("tr", {}, el("td", { class: "faint" }, "No links yet.")))];
    const bar = (value) => {
      const made = el("span", { class: "bar", "aria-hidden": "true" });
      made.style.width = `${Math.round((100 * (value ?? 0)) / most)}%`;
      return made;
    };
    return [
      el("thead", {}, el("tr", {}, ...["From → to", "Loss", "", "Round trip", "Rate"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...rows.map((each) => el("tr", {},
        el("td", { class: blamed.has(`${each.sender},${each.receiver}`) ? "bad" : "" }, `${each.sender} → ${each.receiver}`),
        el("td", {}, percent(each.loss)), el("td", { class: "barcell" }, bar(each.loss)), el("td", {}, seconds(each.rtt)), el("td", {}, each.rate === null ? "free" : rate(each.rate))))),
    ];
  });
}

const opened = { split: false, ranks: false };

// A button that shows the rest of a long list; returns the part to show.
function some(name, list, again) {
  const more = document.getElementById(`${name}-more`);
  more.hidden = list.length <= FEW;
  setText(more, opened[name] ? "Show fewer" : `Show all ${list.length} ranks`);
  more.setAttribute("aria-expanded", String(opened[name]));
  more.onclick = () => { opened[name] = !opened[name]; again(); };
  return opened[name] ? list : list.slice(0, FEW);
}

export function showSplit(data) {
  renew(document.getElementById("split-legend"), 1, () => PARTS.map(([name, words]) => {
    const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = `var(--${name})`;
    return el("li", {}, swatch, words);
  }));
  const total = (split) => split.reduce((sum, part) => sum + part, 0);
  const known = data.ranks.filter((each) => each.split);
  const longest = Math.max(...known.map((each) => total(each.split)), 1e-9);
  // With many ranks, show those that compute longest.
  const order = known.length > FEW ? [...known].sort((a, b) => b.split[0] - a.split[0]) : known;
  const shown = some("split", order, () => showSplit(data));
  renew(document.getElementById("split"), [shown.map((each) => [each.rank, each.split]), longest], () => {
    if (!shown.length) return [el("p", { class: "none" }, "No step is complete yet.")];
    return shown.map((each) => {
      const words = PARTS.map(([, name], place) => [name, each.split[place]]).filter(([, value]) => value > 0).map(([name, value]) => `${name} ${seconds(value)}`);
      const stack = el("div", { class: "stack", role: "img", "aria-label": `Rank ${each.rank}: ${words.join(", ")}`, title: words.join("\n") });
      for (const [place, [name]] of PARTS.entries()) {
        if (!(each.split[place] > 0)) continue;
        const share = each.split[place] / longest;
        const part = el("span", { class: name }, share > (innerWidth < 600 ? 0.3 : 0.11) ? seconds(each.split[place]) : "");
        part.style.width = `${100 * share}%`;
        part.style.background = `var(--${name})`;
        if (share <= 0.02) part.style.padding = "0";
        stack.append(part);
      }
      return el("div", { class: "split", role: "listitem" }, el("span", { class: "name", title: each.host }, `Rank ${each.rank} `, el("small", {}, withoutDomain(each.host))), stack, el("span", { class: "took" }, seconds(total(each.split))));
    });
  });
}

export function showRanks(data) {
  const view = data.job.view;
  setText(document.getElementById("view"), view === null || view === undefined ? "" : `view ${view}, ${data.job.members} members`);
  const table = document.getElementById("ranks");
  const names = ["Rank", "Host", "State", "Step", "Reported", "Heard", "Lost", "Sends", "Cores", "Resent", "Overflow", "Lag", "Drift / bound"];
  // Ranks that do not run come first.
  const fine = (each) => each.state === "running" || each.state === "done";
  const shown = some("ranks", [...data.ranks.filter((each) => !fine(each)), ...data.ranks.filter(fine)], () => showRanks(data));
  renew(table, shown, () => [
    el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col", class: name === "Host" || name === "State" ? "words" : "" }, name)))),
    el("tbody", {}, ...shown.map((each) => el("tr", {},
      el("td", {}, String(each.rank) + (each.incarnation ? ` (${each.incarnation})` : "")),
      el("td", { class: "words host", title: `${each.host}, process ${each.pid}` }, each.host),
      el("td", { class: "words" }, el("span", { class: "state", "data-state": each.state, title: each.why ?? "" }, each.state)),
      el("td", {}, whole(each.step)), el("td", {}, `${Math.round(each.told_s)} s`), el("td", {}, seconds(each.heard_s)), el("td", {}, percent(each.lost)),
      el("td", {}, rate(each.sent)), el("td", {}, each.cores === null ? "–" : each.cores.toFixed(2)), el("td", {}, percent(each.resent)),
      el("td", { class: each.overflow ? "warn" : "" }, whole(each.overflow)), el("td", {}, whole(each.lag)),
      el("td", {}, each.pair_drift === null || !each.pair_bound ? "–" : percent(each.pair_drift / each.pair_bound))))),
  ]);
}

export function showNotes(data) {
  const notes = [...data.notes].reverse();
  renew(document.getElementById("notes"), notes, () => {
    if (!notes.length) return [el("li", { class: "none" }, "No events yet.")];
    return notes.map((note) => el("li", { "data-kind": note.kind === "end" && note.text.startsWith("Failed") ? "failed" : note.kind },
      el("time", { datetime: new Date(1000 * note.time).toISOString() }, clock(note.time)), el("span", { class: "step" }, note.step === null ? "" : `step ${whole(note.step)}`),
      el("span", { class: "what" }, el("span", { class: "kind", "aria-hidden": "true" }), note.text, " ", el("span", { class: "who" }, note.who))));
  });
}

export function showFoot(data) {
  const { job } = data;
  if (!job.policy) return;
  const settings = Object.entries(job.settings).map(([name, value]) => `${name}=${value}`).join(", ");
  const versions = Object.entries(job.versions).map(([name, value]) => `${name} ${value}`).join(", ");
  setText(document.getElementById("foot"), `${job.policy}(${settings}) · ${job.parameters === null ? "" : `${whole(job.parameters)} parameters, ${size(4 * job.parameters)} as float32 · `}${versions}`);
}
