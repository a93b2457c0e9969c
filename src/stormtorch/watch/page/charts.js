// Charts of the time series. A band shows the range over all ranks.
import { clock, colour, digits, el, percent, rate, seconds, setText } from "./format.js";

const EVERY_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const CHARTS = [
  { title: "Time of a step", lines: [["step", "--storm", "step"], ["wait", "--network", "waiting"]], text: seconds },
  { title: "Lost on links", lines: [["worst_loss_high", "--network", "worst", "line"], ["link_loss", "--storm", "mean", "line"], ["lost", "--good", "missing", "line"]], text: percent, least: 0.01 },
  { title: "Sent by a rank", lines: [["sent", "--storm", "sent"]], text: rate },
  { title: "Drift between replicas", lines: [["drift", "--storm", "drift"], ["bound", "--network", "bound", "dash"]], text: (value) => (value === null ? "–" : value === 0 ? "0" : value < 1e-3 ? value.toExponential(1) : digits(value)) },
  { title: "Loss of the training", lines: [["train_loss", "--storm", "loss"]], text: (value) => (value === null ? "–" : digits(value)), free: true },
  { title: "Batch that counts", lines: [["batch", "--good", "share"]], text: percent, most: 1 },
  { title: "Cores in use", lines: [["cores", "--storm", "by a rank"]], text: (value) => (value === null ? "–" : digits(value, 2)) },
  { title: "Round trip", lines: [["rtt", "--storm", "median link"]], text: seconds },
];

export class Charts {
  constructor(box) {
    Object.assign(this, { box, plots: new Map(), columns: { time: [] }, width: null });
    const again = () => { this.drop(); this.draw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(() => this.resize()).observe(box);
  }

  // Bins from `since` on replace the present ones; the others stay.
  take(series) {
    const fresh = series.columns;
    if (series.width_s !== this.width || series.since === 0) {
      this.columns = fresh;
    } else if (fresh.time.length) {
      const keep = this.columns.time.findIndex((time) => time >= fresh.time[0]);
      const kept = keep < 0 ? this.columns.time.length : keep;
      for (const name of new Set([...Object.keys(this.columns), ...Object.keys(fresh)])) {
        const old = (this.columns[name] ?? Array(kept).fill(null)).slice(0, kept);
        this.columns[name] = old.concat(fresh[name] ?? Array(fresh.time.length).fill(null));
      }
    }
    this.width = series.width_s;
    this.draw();
  }

  get last() {
    return this.columns.time.length;
  }

  drop() {
    for (const { plot, card } of this.plots.values()) { plot.destroy(); card.remove(); }
    this.plots.clear();
  }

  draw() {
    for (const chart of CHARTS) {
      const known = chart.lines.filter(([name]) => this.columns[name]?.some((value) => value !== null));
      if (!known.length || this.columns.time.length < 2) continue;
      const shape = known.map(([name]) => name).join();
      let made = this.plots.get(chart.title);
      if (made && made.shape !== shape) { made.plot.destroy(); made.card.remove(); made = null; }
      const data = [this.columns.time];
      for (const [name, , , style] of known) {
        data.push(this.columns[name]);
        if (!style) data.push(this.columns[`${name}_high`], this.columns[`${name}_low`]);
      }
      if (!made) this.plots.set(chart.title, (made = this.make(chart, known, shape, data)));
      else made.plot.setData(data);
      made.data = data;
      this.caption(made, chart, known, this.columns.time.length - 1);
    }
  }

  caption(made, chart, known, place) {
    // The last bin of a measure may still be empty: show the last known value.
    const at = (name) => { for (let i = place; i >= 0; i--) if (this.columns[name][i] !== null) return this.columns[name][i]; return null; };
    setText(made.last, known.map(([name, , words]) => `${words} ${chart.text(at(name))}`).join(" · "));
  }

  make(chart, known, shape, data) {
    const last = el("p", { class: "last" });
    const plotBox = el("div", { class: "plot", role: "img" });
    const card = el("figure", { class: "card chart", "data-chart": chart.title }, el("h3", {}, chart.title), last, plotBox);
    // Keep the order of CHARTS, whichever chart appears first.
    const later = CHARTS.slice(CHARTS.indexOf(chart) + 1).map((each) => this.plots.get(each.title)?.card).find(Boolean);
    this.box.insertBefore(card, later ?? null);
    const made = { card, last, shape, data };
    const series = [{}];
    const bands = [];
    for (const [, tint, , style] of known) {
      const stroke = colour(tint);
      series.push({ stroke, width: 2, dash: style === "dash" ? [6, 4] : undefined, points: { show: false }, spanGaps: true });
      if (!style) {
        bands.push({ series: [series.length, series.length + 1], fill: `${stroke}2e` });
        series.push({ width: 0, points: { show: false }, spanGaps: true }, { width: 0, points: { show: false }, spanGaps: true });
      }
    }
    const ink = colour("--faint");
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    made.plot = new uPlot({
      width: Math.max(200, plotBox.clientWidth), height: 170, series, bands, padding: [10, 30, 0, 0],
      cursor: { sync: { key: "stormtorch" }, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { show: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => (chart.free ? uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true) : [0, chart.most ?? (high > 0 ? Math.max(chart.least ?? 0, high * 1.12) : chart.least ?? 1)]) } },
      axes: [{ ...axis, size: 28, values: (_, times) => times.map((time) => clock(time).replace(/:00$/, "")), space: 68, incrs: EVERY_S },
        // As wide as its widest label.
        { ...axis, size: (_, labels) => Math.max(44, ...(labels ?? []).map((label) => 18 + 7 * String(label ?? "").length)), values: (_, marks) => marks.map((mark) => (mark === 0 ? "0" : chart.text(mark))), space: 34 }],
      hooks: { setCursor: [(plot) => this.caption(made, chart, known, plot.cursor.idx ?? this.columns.time.length - 1)] },
    }, data, plotBox);
    plotBox.setAttribute("aria-label", `${chart.title} over time`);
    return made;
  }

  resize() {
    for (const { plot, card } of this.plots.values()) {
      const width = card.querySelector(".plot").clientWidth;
      if (width > 0 && Math.abs(width - plot.width) > 1) plot.setSize({ width, height: 170 });
    }
  }
}
