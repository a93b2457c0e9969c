// Heat map of the links: a row per receiver, a column per sender.
import { colour, el, percent, rate, seconds, setText, shortRate, withoutDomain } from "./format.js";

const MEASURES = {
  loss: { title: "Loss", cell: (value) => (value === null ? "·" : 100 * value >= 9.95 ? (100 * value).toFixed(0) : (100 * value).toFixed(value < 5e-4 ? 0 : 1)), unit: "in percent" },
  rtt: { title: "Round trip", cell: (value) => (value === null ? "·" : 1e3 * value >= 9.95 ? (1e3 * value).toFixed(0) : (1e3 * value).toFixed(1)), unit: "in ms" },
  rate: { title: "Rate", cell: (value) => (value === null ? "·" : shortRate(value)), unit: "in bit/s" },
};

// Heat from 0 to 1: loss on a logarithmic scale from 0.2 % to 30 %; the others by their ratio to the median, with a
// factor of eight as the maximum.
function heat(measure, value, median) {
  if (value === null) return 0;
  if (measure === "loss") return value <= 0 ? 0 : Math.max(0, Math.min(1, Math.log(value / 2e-3) / Math.log(150)));
  const factor = measure === "rtt" ? value / median : median / value;
  return Math.max(0, Math.min(1, Math.log(factor) / Math.log(8)));
}

function middle(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : 1;
}

export class Matrix {
  constructor(box, choice, detail, hint) {
    Object.assign(this, { box, detail, hint, measure: "loss", shape: "", at: [0, 1], data: null });
    this.buttons = Object.entries(MEASURES).map(([name, { title }]) => {
      const button = el("button", { type: "button", role: "radio", "aria-checked": String(name === "loss"), tabindex: name === "loss" ? "0" : "-1" }, title);
      button.addEventListener("click", () => this.choose(name));
      choice.append(button);
      return [name, button];
    });
    choice.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const place = this.buttons.findIndex(([name]) => name === this.measure);
      const [name, button] = this.buttons[(place + step + this.buttons.length) % this.buttons.length];
      this.choose(name);
      button.focus();
    });
  }

  choose(name) {
    this.measure = name;
    for (const [each, button] of this.buttons) {
      button.setAttribute("aria-checked", String(each === name));
      button.tabIndex = each === name ? 0 : -1;
    }
    if (this.data) this.show(this.data);
  }

  show(data) {
    this.data = data;
    const matrix = data.matrix;
    if (!matrix || matrix.ranks.length < 2) {
      this.box.replaceChildren(el("p", { class: "none" }, matrix ? "No links: there is one rank." : "Too many ranks for a matrix: see the worst links."));
      this.shape = "";
      return;
    }
    const shape = matrix.ranks.join();
    if (shape !== this.shape) this.build(data, shape);
    const { cell, unit, title } = MEASURES[this.measure];
    const values = matrix[this.measure];
    const median = middle(values.flat());
    const blamed = new Set((data.verdict[0].links || []).map((link) => link.join()));
    const dense = matrix.ranks.length > 24;
    const glow = colour("--heat");
    this.table.setAttribute("aria-label", `${title} of each link ${unit}; rows receive, columns send`);
    this.hint.textContent = `${title} ${unit}. Rows receive, columns send. Arrow keys move between links.`;
    for (const [row, cells] of this.cells.entries()) {
      for (const [column, node] of cells.entries()) {
        if (row === column) continue;
        const hot = heat(this.measure, values[row][column], median);
        if (!dense) setText(node, cell(values[row][column]));
        const paint = hot > 0.01 ? `rgba(${glow}, ${(0.08 + 0.82 * hot).toFixed(2)})` : "";
        if (node.dataset.paint !== paint) {
          node.dataset.paint = paint;
          node.style.background = paint;
        }
        node.classList.toggle("hot", hot > 0.5);
        node.classList.toggle("blamed", blamed.has(`${matrix.ranks[column]},${matrix.ranks[row]}`));
      }
    }
    this.describe();
  }

  build(data, shape) {
    const ranks = data.matrix.ranks;
    const hosts = new Map(data.ranks.map((each) => [each.rank, each.host]));
    this.shape = shape;
    const heads = ranks.map((rank) => el("th", { scope: "col", title: `sent by rank ${rank} ${hosts.get(rank) ?? ""}` }, ranks.length > 24 && rank % 8 ? "" : String(rank)));
    const distinct = new Set(hosts.values()).size > 1 && ranks.length <= 12;
    this.cells = [];
    const rows = ranks.map((rank, row) => {
      const cells = ranks.map((_, column) => el("td", row === column ? { class: "self", "aria-label": "itself" } : { tabindex: "-1" }, ""));
      this.cells.push(cells);
      const name = ranks.length > 24 && rank % 8 ? "" : String(rank);
      const head = el("th", { scope: "row", title: `received by rank ${rank} ${hosts.get(rank) ?? ""}` }, name);
      if (distinct) head.append(el("span", { class: "host" }, ` ${withoutDomain(hosts.get(rank))}`));
      return el("tr", {}, head, ...cells);
    });
    const kind = ranks.length > 24 ? " dense" : ranks.length > 12 ? " middle" : "";
    this.table = el("table", { class: `matrix${kind}`, role: "grid" },
      el("thead", {}, el("tr", {}, el("td", { class: "corner" }, ranks.length > 12 ? "" : "to \\ from"), ...heads)), el("tbody", {}, ...rows));
    this.at = [0, 1];
    this.table.addEventListener("keydown", (event) => this.move(event));
    const seek = (event) => {
      for (const [row, cells] of this.cells.entries()) {
        const column = cells.indexOf(event.target);
        if (column >= 0 && column !== row) this.focus(row, column, event.type === "click");
      }
    };
    this.table.addEventListener("mouseover", seek);
    this.table.addEventListener("click", seek);
    this.box.replaceChildren(this.table);
    this.cells[0][1].tabIndex = 0;
  }

  move(event) {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const count = this.cells.length;
    let [row, column] = this.at;
    do {
      row = (row + step[0] + count) % count;
      column = (column + step[1] + count) % count;
    } while (row === column);
    this.focus(row, column, true);
  }

  focus(row, column, really) {
    this.cells[this.at[0]][this.at[1]].tabIndex = -1;
    this.at = [row, column];
    this.cells[row][column].tabIndex = 0;
    if (really) this.cells[row][column].focus();
    this.told = true;
    this.describe();
  }

  describe() {
    const { matrix, ranks } = this.data;
    // Until a link is selected, show the worst.
    if (!this.told && this.data.worst.length) {
      const worst = this.data.worst[0];
      this.at = [matrix.ranks.indexOf(worst.receiver), matrix.ranks.indexOf(worst.sender)];
    }
    const [row, column] = this.at;
    if (row < 0 || column < 0) return;
    const [to, from] = [matrix.ranks[row], matrix.ranks[column]];
    const host = (rank) => ranks.find((each) => each.rank === rank)?.host ?? "";
    const names = host(from) === host(to) ? `rank ${from} → rank ${to}` : `rank ${from} (${host(from)}) → rank ${to} (${host(to)})`;
    const loss = matrix.loss[row][column];
    const text = `${this.told ? "" : "Worst: "}${names}: ${loss === null ? "loss not known" : `loses ${percent(loss)}`}, round trip ${seconds(matrix.rtt[row][column])}, ` +
      (matrix.rate[row][column] === null ? "rate not limited" : `rate ${rate(matrix.rate[row][column])}`);
    setText(this.detail, text);
    this.cells[row][column].setAttribute("aria-label", text);
  }
}
