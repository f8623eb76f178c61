// Curves over the steps: one chart for each thing that one looks at, a line for each run and name.
const CHARTS = [
  {title: "Reward", lines: ["reward"], evaluations: true},
  {title: "Reward, standard deviation", lines: ["reward_std"]},
  {title: "Lag of trained tokens, versions", lines: ["lag_mean", "lag_max", "max_lag"]},
  {title: "Engine beside trainer: KL (k3), nats", lines: ["mismatch_kl_k3", "mismatch_bound"]},
  {title: "Loss", lines: ["loss", "critic_loss"]},
  {title: "Loss on held-out rows, nats a token", lines: [], losses: true},
  {title: "Gradient norm", lines: ["grad_norm"]},
  {title: "Entropy, nats", lines: ["entropy"]},
  {title: "KL from the reference, nats", lines: ["reference_kl"]},
  {title: "KL from the policy that the ratio compares with, nats", lines: ["approx_kl"]},
  {title: "Clipped share of tokens", lines: ["clip_fraction", "clip_fraction_dual"]},
  {title: "Response, tokens", lines: ["response_tokens"]},
  {title: "Turns", lines: ["turns"]},
  {title: "Answers that ended by themselves", lines: ["finished_share"]},
  {title: "Seconds of a step", lines: ["train_step_s", "wait_s", "turn_wait_s", "publish_wait_s"]},
  {title: "Groups in the queues", lines: ["leased", "unscored", "ready"]},
];
const NAMES = {reward: "sampled", lag_mean: "mean", lag_max: "most", max_lag: "bound", mismatch_kl_k3: "KL",
  mismatch_bound: "warned of above", train_step_s: "training", wait_s: "waiting for groups",
  turn_wait_s: "waiting until rollouts sleep",
  publish_wait_s: "waiting for the version before"};
const FACTS = {reward_first: "reward, first step", reward_last: "reward, last 10 steps"};
const FEW = 3;  // so many points are a line; fewer are shown as points
const DASHED = new Set(["max_lag", "mismatch_bound"]);

class Curves {
  constructor(place, runs) {
    this.place = place;
    this.runs = runs;
    this.plots = [];
    this.draw();
    addEventListener("resize", () => this.plots.forEach((plot) => plot.setSize(this.size(plot.root.parentNode))));
  }

  draw() {
    this.plots.forEach((plot) => plot.destroy());
    this.plots = [];
    const grid = make("div", {class: "charts"}), found = this.charts();
    this.place.replaceChildren(...this.runs.flatMap((run) => this.about(run)), grid);
    this.plots = found.map((chart) => this.plot(grid, chart));
    this.drawn = this.key(found);
  }

  // Where the lines are the same ones, what was zoomed into or hidden stays so.
  renew() {
    const found = this.charts();
    if (this.key(found) !== this.drawn) { this.draw(); return; }
    found.forEach((chart, i) => {
      const plot = this.plots[i], x = plot.data[0], {min, max} = plot.scales.x, closer = min > x[0] || max < x.at(-1);
      plot.setData(this.columns(chart), !closer);
      if (closer) plot.redraw();
    });
  }

  key(found) {
    return JSON.stringify([this.runs.map((run) => run.summary), found.map((chart) => [chart.title,
      chart.every.map((line) => line.label), this.columns(chart)[0].length < FEW])]);
  }

  charts() {
    const named = {title: "Columns, mean of each step", compared: true, lines: [...new Set(this.runs.flatMap((run) => run.columns))]
      .filter((name) => name !== "reward")};
    const every = [...new Set(this.runs.flatMap((run) => Object.keys(run.steps)))];
    const latency = {title: "Seconds until a column was there", compared: true,
      lines: every.filter((name) => name.startsWith("latency/"))};
    const byLag = [["kl", "KL from the engine (k3) by lag, nats"], ["ess", "Effective sample size by lag"],
      ["clipped", "Clipped share of tokens by lag"]].map(([what, title]) => ({title, compared: true,
      lines: every.filter((name) => name.startsWith("lag/") && name.endsWith("/" + what)).sort()}));
    const more = named.lines.length > 1 ? [named] : [];
    const layers = (what, title) => ({title, compared: true, lines: every.filter((name) =>
      name.startsWith("layer/") && name.endsWith("/" + what)).sort((a, b) => a.localeCompare(b, "en", {numeric: true}))});
    const insides = [layers("grad_norm", "Gradient norm by layer"), layers("update", "Update over weights, by layer"),
      {title: "Memory of the trainer, GiB", compared: true, lines: every.filter((name) => name.startsWith("memory/"))}];
    const found = [CHARTS[0], ...more, ...CHARTS.slice(1), ...byLag, ...insides, latency].map((chart) => this.chart(chart));
    return [...found, this.pauses(), this.rates()].filter((chart) => chart.every.some((line) => !line.bound));
  }

  about(run) {
    const summary = run.summary;
    if (!summary) return [];
    const facts = make("dl", {class: "facts"});
    const shown = ["outcome", "steps", "reward_first", "reward_last", "eval_before", "eval_after", "lag_max_seen",
      "groups_trained", "groups_lost", "groups_trained_twice", "steps_skipped", "rewards_failed", "restarts", "train_s"];
    for (const name of shown) {
      if (name in summary) facts.append(make("div", {}, make("dt", {}, FACTS[name] ?? name.replaceAll("_", " ")),
        make("dd", {}, number(summary[name]))));
    }
    return [make("h2", {}, run.name), facts];
  }

  size(node) {
    return {width: Math.max(240, node.clientWidth - 20), height: 190};
  }

  chart({title, lines, evaluations, losses, compared}) {  // compared: of several runs, all lines of each
    const every = [];
    const several = this.runs.length > 1;
    this.runs.forEach((run, which) => {
      (several && !compared ? lines.slice(0, 1) : lines).forEach((name, place) => {
        const values = run.steps[name];
        if (!values || values.every((value) => value == null)) return;
        const label = several ? (lines.length > 1 && compared ? `${run.name}: ${name}` : run.name) : NAMES[name] ?? name;
        const shade = several ? which + place * this.runs.length : place;
        every.push({x: run.steps.step, y: values, label, shade, dash: DASHED.has(name), bound: DASHED.has(name)});
      });
      const wanted = several && !compared ? lines.slice(0, 1) : lines;
      const told = [...new Set(run.evaluations.flatMap((row) => Object.keys(row.parts)))];
      told.filter((name) => wanted.includes(name.slice(name.indexOf("/") + 1))).forEach((name, place) => {
        const rows = run.evaluations.filter((row) => name in row.parts).sort((a, b) => a.step - b.step);
        every.push({x: rows.map((row) => row.step), y: rows.map((row) => row.parts[name]),
          label: (several ? run.name + ": " : "") + name + ", evaluated", shade: several ? which : lines.length + place,
          points: true, dash: true});
      });
      if (evaluations) {
        const sets = new Set(run.evaluations.flatMap((row) => Object.keys(row.sets)).filter((name) =>
          !several || !name.includes("/")));
        [...sets].forEach((name, place) => {
          const rows = run.evaluations.filter((row) => name in row.sets).sort((a, b) => a.step - b.step);
          const sampled = run.sampled?.some((one) => name === one || name.startsWith(one + "/"));
          const label = (several ? run.name + ": " : "") + name + (sampled ? ", sampled" : ", greedy");
          every.push({x: rows.map((row) => row.step), y: rows.map((row) => row.sets[name]), label,
            shade: several ? which : 1 + place, points: true, dash: true});
        });
      }
    });
    for (const run of losses ? this.runs : []) {
      [...new Set(run.losses.flatMap((row) => Object.keys(row.sets)))].forEach((name, place) => {
        const rows = run.losses.filter((row) => name in row.sets).sort((a, b) => a.step - b.step);
        every.push({x: rows.map((row) => row.step), y: rows.map((row) => row.sets[name]),
          label: (several ? run.name + ": " : "") + name, shade: several ? this.runs.indexOf(run) : place, points: true});
      });
    }
    const one = several && !compared && lines.length > 1;  // of several quantities, which
    return {title: one ? `${title}: ${NAMES[lines[0]] ?? lines[0]}` : title, every, unit: "step"};
  }

  pauses() {
    const every = [];
    for (const run of this.runs.length > 1 ? [] : this.runs) {
      const rows = run.loads.receiver ?? [];
      [...new Set(rows)].forEach((receiver, place) => {
        const mine = rows.map((name, index) => index).filter((index) => rows[index] === receiver);
        every.push({x: mine.map((i) => run.loads.version[i]), y: mine.map((i) => 1000 * run.loads.pause_s[i]),
          label: receiver, shade: place});
      });
    }
    return {title: "Pause of generation for a version, ms", every, unit: "version"};
  }

  rates() {
    const every = [];
    this.runs.forEach((run, which) => {
      const {time, actors} = run.beats;
      if (!time.length) return;
      const rate = time.map((_, i) => Object.values(actors).reduce((sum, one) => sum + (one.tokens_per_s[i] ?? 0), 0));
      every.push({x: time.map((value) => value - time[0]), y: rate, label: run.name, shade: which});
    });
    return {title: "Generated tokens a second", every, unit: "seconds"};
  }

  columns({every}) {  // as uPlot has them: x, and of each line its values there
    const x = [...new Set(every.flatMap((line) => line.x))].sort((a, b) => a - b);
    const at = new Map(x.map((value, index) => [value, index]));
    const data = every.map((line) => {
      const column = new Array(x.length).fill(null);
      line.x.forEach((value, index) => { column[at.get(value)] = line.y[index]; });
      return column;
    });
    return [x, ...data];
  }

  plot(grid, chart) {
    const {title, every, unit} = chart, data = this.columns(chart), few = data[0].length < FEW;
    const box = make("div", {class: "chart"}, make("h2", {}, title));
    grid.append(box);
    const axis = {stroke: style("--quiet"), grid: {stroke: style("--line"), width: 1}, ticks: {show: false}};
    return new uPlot({
      ...this.size(box),
      scales: {x: {time: false}},
      series: [{label: unit, value: (_, value) => number(value, 5)}, ...every.map((line) => ({
        label: line.label, stroke: colour(line.shade), width: 1.5, spanGaps: true, dash: line.dash ? [6, 4] : undefined,
        points: {show: Boolean(line.points) || few, size: 6}, value: (_, value) => number(value, 5),
      }))],
      axes: [axis, {...axis, size: 54, values: (_, at, place, space, step) => ticks(at, step)}],
    }, data, box);
  }
}
