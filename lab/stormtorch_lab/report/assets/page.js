"use strict";
// Draws every line chart of the page with uPlot: lines with their names at their ends, bands, marks, and a tip under the
// pointer. Colours are those of the style sheet, so that charts follow dark and light.
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const places = Array.from(document.querySelectorAll(".plot"));
  const style = () => getComputedStyle(document.documentElement);
  const colour = (name) => style().getPropertyValue("--" + name).trim() || style().getPropertyValue("--ink");
  const fade = (value, share) => "color-mix(in srgb, " + value + " " + share + "%, transparent)";
  const FONT = "12px system-ui, sans-serif";
  const short = (value) => {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
    if (size >= 100) return String(Math.round(value));
    return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
  };

  function joined(chart) {
    // One table of x for all: every series keeps its own points, and lines span the gaps.
    const tables = chart.series.map((each) => each.low ? [each.x, each.y, each.low, each.high] : [each.x, each.y]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  function seriesOf(chart) {
    const list = [{}], bands = [];
    chart.series.forEach((each) => {
      const ink = colour(each.colour);
      const few = each.x.length <= 60;
      list.push({ label: each.name, stroke: ink, width: 2.5, spanGaps: true, dash: each.dashed ? [8, 5] : undefined,
        points: { show: few, size: 6, fill: ink, stroke: ink } });
      if (each.low) {
        const edge = { stroke: fade(ink, 25), width: 1, spanGaps: true, points: { show: false } };
        list.push({ ...edge, label: "low" }, { ...edge, label: "high" });
        bands.push({ series: [list.length - 1, list.length - 2], fill: fade(ink, 16) });
      }
    });
    return [list, bands];
  }

  function drawMarks(plot, chart) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = ratio * 12 + "px system-ui, sans-serif";
    const used = [];
    chart.marks.forEach((mark) => {
      ctx.strokeStyle = ctx.fillStyle = mark.colour === "ink" ? colour("soft") : colour(mark.colour);
      ctx.lineWidth = ratio;
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.beginPath();
      if (mark.y !== null) {
        const y = plot.valToPos(mark.y, "y", true);
        ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
        ctx.textAlign = "left"; ctx.textBaseline = "bottom";
        ctx.fillText(mark.text, bbox.left + 6 * ratio, y - 3 * ratio);
      } else {
        const x = plot.valToPos(mark.x, "x", true);
        ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
        const wide = ctx.measureText(mark.text).width;
        let top = bbox.top + 4 * ratio;
        used.forEach((other) => { if (Math.abs(other - x) < 2 * wide + 14 * ratio) top += 16 * ratio; });
        used.push(x);
        const right = x + wide + 8 * ratio < bbox.left + bbox.width;
        ctx.textAlign = right ? "left" : "right"; ctx.textBaseline = "top";
        ctx.fillText(mark.text, x + (right ? 5 : -5) * ratio, top);
      }
    });
    ctx.restore();
  }

  function drawNames(plot, chart) {
    // Names stand at the ends of their lines, and make room for each other.
    const { ctx, bbox } = plot, ratio = devicePixelRatio, high = 17 * ratio;
    const names = chart.series.map((each) => {
      const index = each.y.reduce((last, value, at) => value === null ? last : at, 0);
      return { text: each.name, ink: colour(each.colour), x: plot.valToPos(each.x[index], "x", true),
        y: plot.valToPos(each.y[index], "y", true) };
    }).sort((a, b) => a.y - b.y);
    names.forEach((each) => { each.at = each.y; });
    for (let turn = 0; turn < 60; turn++) {
      for (let i = 1; i < names.length; i++) {
        const gap = names[i].at - names[i - 1].at;
        if (gap < high) { names[i].at += (high - gap) / 2; names[i - 1].at -= (high - gap) / 2; }
      }
    }
    ctx.save();
    ctx.font = "600 " + ratio * 12.5 + "px system-ui, sans-serif";
    ctx.textBaseline = "middle"; ctx.textAlign = "left";
    const edge = bbox.left + bbox.width + 12 * ratio;
    names.forEach((each) => {
      ctx.fillStyle = ctx.strokeStyle = each.ink;
      ctx.globalAlpha = 0.5; ctx.lineWidth = ratio;
      ctx.beginPath(); ctx.moveTo(each.x + 5 * ratio, each.y); ctx.lineTo(edge - 4 * ratio, each.at); ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.fillText(each.text, edge, each.at);
    });
    ctx.restore();
  }

  function tipOf(place, chart) {
    const tip = document.createElement("div");
    tip.className = "tip";
    place.append(tip);
    return (plot) => {
      const { left, top } = plot.cursor;
      if (left === undefined || left < 0) { tip.style.display = "none"; return; }
      const x = plot.posToVal(left, "x");
      tip.textContent = "";
      const head = document.createElement("div");
      head.textContent = chart.x_label + ": " + short(x);
      tip.append(head);
      chart.series.forEach((each) => {
        let best = 0;
        each.x.forEach((value, index) => { if (Math.abs(value - x) < Math.abs(each.x[best] - x)) best = index; });
        const line = document.createElement("div"), name = document.createElement("b");
        name.textContent = each.name + " ";
        name.style.color = colour(each.colour);
        line.append(name, short(each.y[best]) + " at " + short(each.x[best]));
        tip.append(line);
      });
      tip.style.display = "block";
      const beside = left + plot.over.offsetLeft;
      const flip = beside + tip.offsetWidth + 30 > place.clientWidth;
      tip.style.left = (flip ? Math.max(beside - tip.offsetWidth - 12, 0) : beside + 14) + "px";
      tip.style.top = Math.max(top - 10, 0) + "px";
    };
  }

  function draw(place, chart) {
    place.textContent = "";
    const wide = place.clientWidth, narrow = wide < 560;
    place.parentElement.classList.toggle("narrow", narrow);
    const chips = document.createElement("div");
    chips.className = "chips";
    chart.series.forEach((each) => {
      const chip = document.createElement("span");
      chip.textContent = each.name;
      chip.style.color = colour(each.colour);
      chips.append(chip);
    });
    if (narrow && chart.series.length > 1) place.append(chips);
    if (!chart.series.length) { place.textContent = "Nothing was measured."; return; }
    const probe = document.createElement("canvas").getContext("2d");
    probe.font = "600 12.5px system-ui, sans-serif";
    const alone = chart.series.length < 2;
    const room = narrow || alone ? 14 : 24 + Math.max(...chart.series.map((each) => probe.measureText(each.name).width));
    const [series, bands] = seriesOf(chart);
    const axis = { stroke: colour("soft"), font: FONT, labelFont: FONT, labelSize: 16, labelGap: 0, gap: 4, grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false } };
    const values = (_plot, list) => list.map((value) => short(value));
    const follow = tipOf(place, chart);
    const marked = chart.marks.map((mark) => mark.y).concat(chart.from_zero ? [0] : []).filter((y) => y !== null);
    const range = chart.y_log ? undefined
      : (_plot, low, high) => uPlot.rangeNum(Math.min(low, ...marked), Math.max(high, ...marked), 0.08, true);
    new uPlot({
      width: wide, height: narrow ? 270 : 340, padding: [12, room, 0, 0], series, bands,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
      scales: { x: { time: false, distr: chart.x_log ? 3 : 1 }, y: { distr: chart.y_log ? 3 : 1, range } },
      axes: [{ ...axis, label: chart.x_label, values, space: 60, size: 24 }, { ...axis, label: chart.y_label, values, size: 52 }],
      hooks: {
        draw: [(plot) => { drawMarks(plot, chart); if (!narrow && !alone) drawNames(plot, chart); }],
        setCursor: [follow],
      },
    }, joined(chart), place);
  }

  const all = () => places.forEach((place, index) => draw(place, charts[index]));
  let wait = 0, last = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === last) return;
    last = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(all, 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
})();
