// Puts the views together, and keeps them fresh while a run goes on.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs, place = (name) => document.getElementById(name), EVERY_MS = 2000, COMPLETE_MS = 30_000;

const remembered = {};  // a sandboxed frame has no storage
try { remembered.theme = localStorage.theme; } catch (error) { /* then it is forgotten */ }
if (remembered.theme === "dark" || (!remembered.theme && matchMedia("(prefers-color-scheme: dark)").matches)) {
  document.documentElement.classList.add("dark");
}
place("title").textContent = runs.map((run) => run.name).join(", ");

const views = {
  curves: new Curves(place("curves"), runs),
  timeline: new Timeline(place("timeline"), runs),
  rollouts: new Rollouts(place("rollouts"), runs, data.live ? (which) => ask(`runs/${which}/groups?run=${runs[which].id}`) : null),
};
function configs() {
  place("config").replaceChildren(...runs.flatMap((run) => [make("h2", {}, run.name), make("pre", {}, run.config)]));
}
configs();

const tabs = [...place("tabs").children];
function open(name) {
  for (const tab of tabs) {
    const chosen = tab.id === "tab-" + name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    place(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (location.hash.slice(1) !== name) history.replaceState(null, "", "#" + name);
  if (name === "timeline") views.timeline.draw();
  if (name === "rollouts") views.rollouts.show();
  if (name === "curves") views.curves.draw();
}
tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => open(tab.id.slice(4)));
  tab.addEventListener("keydown", (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by) return;
    const next = tabs[(index + by + tabs.length) % tabs.length];
    next.focus();
    open(next.id.slice(4));
  });
});
addEventListener("hashchange", () => open(location.hash.slice(1) || "curves"));
addEventListener("keydown", (event) => {
  if (event.key === "Escape") event.target.blur?.();
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey) return;
  if (/^[1-4]$/.test(event.key)) open(tabs[event.key - 1].id.slice(4));
  if (event.key === "t") place("theme").click();
  if (place("rollouts").hidden) return;
  if (event.key === "/") { event.preventDefault(); place("search").focus(); }
  if (event.key === "j" || event.key === "k") views.rollouts.move(event.key === "j" ? 1 : -1);
});
place("theme").addEventListener("click", () => {
  document.documentElement.classList.toggle("dark");
  try { localStorage.theme = dark() ? "dark" : "light"; } catch (error) { /* then it is forgotten */ }
  views.curves.draw();
  views.timeline.draw();
});

function say() {
  place("state").textContent = runs.map((run) => {
    const rewards = run.steps.reward ?? [], done = run.summary?.steps ?? (run.steps.step?.at(-1) ?? -1) + 1;
    const state = run.summary ? run.summary.outcome : data.live ? "under way" : "as it was";
    return `${runs.length > 1 ? run.name + ": " : ""}${state}, step ${number(done)} of ${number(run.wanted)}`
      + (rewards.length ? `, reward ${number(rewards.at(-1))}` : "") + (run.unread ? `; ${run.unread}` : "");
  }).join(" · ");
}

// In every view, while a run goes on and after.
function alarm() {
  const found = runs.flatMap((run) => [...(run.summary?.error ? ["ended with an error: " + run.summary.error] : []),
    ...(run.alerts ?? [])].map((text) => (runs.length > 1 ? run.name + ": " : "") + text));
  const box = place("alerts");
  if (box.dataset.said === found.join("\n")) return;  // what is read out is not read out again
  box.dataset.said = found.join("\n");
  box.hidden = !found.length;
  box.replaceChildren(make("h2", {}, "Look at this"), make("ul", {}, ...found.map((text) => make("li", {}, text))));
  document.title = (found.length && data.live ? "(!) " : "") + document.title.replace(/^\(!\) /, "");
}

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path);
  } catch (error) {
    throw new Error(`the page's server does not answer (${error.message}); penstock page starts it again`);
  }
  if (answer.status === 409 || answer.status === 404) throw new Error("another run is served here by now; reload the page");
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).detail ?? `${path}: ${answer.status}`);
  return answer.json();
}

// Columns of rows that came before, and rows that are new; where is the place of each of these.
function merge(columns, fresh, where) {
  const length = Object.values(columns)[0]?.length ?? 0;
  for (const name of new Set([...Object.keys(columns), ...Object.keys(fresh)])) {
    columns[name] ??= new Array(length).fill(null);
    where.forEach((row, i) => { columns[name][row] = fresh[name]?.[i] ?? null; });
  }
}

// A step that was done again, by a run that goes on, takes the place of what it was.
function places(known = [], fresh = []) {
  const at = new Map(known.map((step, i) => [step, i]));
  return fresh.map((step) => { if (!at.has(step)) at.set(step, at.size); return at.get(step); });
}

// Beats that are new, behind those that are here; or all of them, where they were thinned.
function follow(run, fresh) {
  const behind = fresh.behind, where = fresh.time.map((_, i) => behind + i);
  const {time, actors, queues} = behind ? run.beats : {time: [], actors: {}, queues: {}};
  time.push(...fresh.time);
  for (const name of new Set([...Object.keys(actors), ...Object.keys(fresh.actors)])) {
    const {kind, ...columns} = fresh.actors[name] ?? {};
    actors[name] ??= {kind, ...Object.fromEntries(Object.keys(columns).map((column) => [column, new Array(behind).fill(null)]))};
    const {kind: _, ...known} = actors[name];
    merge(known, columns, where);
  }
  merge(queues, fresh.queues, where);
  run.beats = {time, sessions: fresh.sessions, queues,
    actors: Object.fromEntries(Object.keys(actors).sort().map((name) => [name, actors[name]]))};
}

async function renew(which, run) {
  const {seen} = run;
  const {steps, loads, evaluations, losses, columns, beats, ...fresh}
    = await ask(`runs/${which}?run=${run.id}&metrics=${seen.metrics}&loads=${seen.loads}&beats=${seen.beats}`);
  const loaded = run.loads.time?.length ?? 0;
  merge(run.steps, steps, places(run.steps.step, steps.step));
  merge(run.loads, loads, (loads.time ?? []).map((_, i) => loaded + i));
  follow(run, beats);
  run.evaluations.push(...evaluations);
  run.losses.push(...losses);
  run.columns = [...new Set([...run.columns, ...columns])];
  const changed = Boolean(steps.step || evaluations.length || losses.length) || run.summary?.outcome !== fresh.summary?.outcome;
  if (run.config !== fresh.config) { run.config = fresh.config; configs(); }
  Object.assign(run, fresh, {unread: null});
  return changed;
}

// Each run by itself: of one that cannot be read the others know nothing.
async function renewAll() {
  let changed = false;
  for (const [which, run] of runs.entries()) {
    if (Date.now() < (run.again ?? 0)) continue;
    try {
      changed = await renew(which, run) || changed;
    } catch (error) {
      run.unread = error.message;
    }
    run.again = run.summary?.outcome === "complete" ? Date.now() + COMPLETE_MS : 0;  // it may go on all the same
  }
  say();
  alarm();
  if (changed && !place("curves").hidden) views.curves.renew();
  views.timeline.draw();
}

async function live() {
  await renewAll();
  setTimeout(live, EVERY_MS);  // one that was interrupted may go on
}

say();
alarm();
open(place(location.hash.slice(1))?.matches("[role=tabpanel]") ? location.hash.slice(1) : "curves");
if (data.live) setTimeout(live, EVERY_MS);
