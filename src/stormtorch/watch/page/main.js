// The page of `stormtorch watch`: polls for new data every two seconds while it is visible; a report has its data inside.
import { Charts } from "./charts.js";
import { seconds, setText } from "./format.js";
import { Matrix } from "./matrix.js";
import { showFoot, showNotes, showRanks, showSplit, showTiles, showVerdict, showWorst } from "./tables.js";

const EVERY_MS = 2000;
const byId = (id) => document.getElementById(id);
const matrix = new Matrix(byId("matrix-box"), byId("measures"), byId("detail"), byId("matrix-hint"));
const charts = new Charts(byId("charts"));
const WORDS = { empty: "no records yet", running: "running", silent: "silent", failed: "failed", done: "finished", left: "finished", gone: "cut off" };
let requested = { since: 0, width: 0 };

function show(data, report) {
  setText(byId("job-name"), data.job.name ? ` ${data.job.name}` : "");
  const about = data.job.world ? `${data.ranks.length} ranks on ${data.job.hosts} host${data.job.hosts > 1 ? "s" : ""}, from ${data.source}` : data.source;
  setText(byId("where"), about);
  document.title = `${WORDS[data.state]}: ${data.verdict[0].text}`.slice(0, 90);
  byId("live").dataset.state = data.state;
  const age = data.now - data.told;
  setText(byId("live-text"), report ? `${WORDS[data.state]} · report` : `${WORDS[data.state]}${data.told ? ` · reported ${age < 100 ? `${Math.max(1, Math.round(age))} s` : seconds(age)} ago` : ""}`);
  showVerdict(data);
  showTiles(data);
  matrix.show(data);
  showWorst(data);
  showSplit(data);
  charts.take(data.series);
  showRanks(data);
  showNotes(data);
  showFoot(data);
}

async function ask() {
  try {
    const answer = await fetch(`data?since=${requested.since}&width=${requested.width}`, { cache: "no-store", credentials: "same-origin" });
    if (!answer.ok) throw new Error(answer.status === 401 ? "the token is no longer valid: open the printed address again" : `the server answered ${answer.status}`);
    const data = await answer.json();
    show(data, false);
    // The last bins may still change: request a few of them again.
    const times = charts.columns.time;
    const start = data.series.start ?? 0;
    const last = times.length ? Math.round((times[times.length - 1] - start) / data.series.width_s - 0.5) : 0;
    requested = { since: Math.max(0, last - 6), width: data.series.width_s };
  } catch (error) {
    byId("live").dataset.state = "lost";
    setText(byId("live-text"), error instanceof TypeError ? "stormtorch watch has ended, or is unreachable" : String(error.message));
  }
}

const inside = byId("data");
if (inside) {
  show(JSON.parse(inside.textContent), true);
} else {
  const loop = async () => {
    if (document.visibilityState === "visible") await ask();
    setTimeout(loop, EVERY_MS);
  };
  document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") ask(); });
  loop();
}
