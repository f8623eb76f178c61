// A lane for every process: how busy it was, what the trainer waited for, which versions came, who died.
const LANE = 26, LEFT = 110, TOP = 22;

class Timeline {
  constructor(place, runs) {
    this.runs = runs;
    this.which = 0;
    this.range = null;
    this.canvas = make("canvas", {role: "img", "aria-label": "Timeline of the processes", tabindex: "0"});
    this.pick = make("select", {"aria-label": "Run", onchange: () => { this.which = +this.pick.value; this.range = null;
      this.draw(); }}, ...runs.map((run, index) => make("option", {value: index}, run.name)));
    const key = make("div", {class: "key"}, ...[["busy: the darker, the busier", "--accent"]].map(([text, name]) =>
      make("span", {}, make("i", {style: `background: var(${name})`}), text)),
    make("span", {}, make("i", {style: "background:#15803d"}), "the trainer's steps"),
    make("span", {}, make("i", {style: "background:#d97706"}), "waiting for groups, for the version before"),
    make("span", {}, "▾ a version is served"), make("span", {}, "✕ died, and was started again"),
    make("span", {}, "drag: closer; double click, or ", make("kbd", {}, "0"), ": all"));
    place.replaceChildren(...(runs.length > 1 ? [this.pick] : []), key, make("div", {class: "swim"}, this.canvas));
    this.place = place;
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", (event) => showTip(event, ""));
    this.canvas.addEventListener("mousedown", (event) => { this.from = event.offsetX; });
    this.canvas.addEventListener("mouseup", (event) => this.zoom(event.offsetX));
    this.canvas.addEventListener("dblclick", () => { this.range = null; this.draw(); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    addEventListener("resize", () => this.draw());
  }

  key(event) {
    const [begin, end] = this.shown(), span = end - begin;
    const moves = {ArrowLeft: [begin - span / 4, end - span / 4], ArrowRight: [begin + span / 4, end + span / 4],
      "+": [begin + span / 4, end - span / 4], "-": [begin - span / 2, end + span / 2], 0: null};
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.range = moves[event.key];
    this.draw();
  }

  get run() { return this.runs[this.which]; }

  shown() {
    const {time} = this.run.beats;
    return this.range ?? [time[0] ?? 0, time[time.length - 1] ?? 1];
  }

  // Beats that are the first ones of a start: between them and those before, nobody was there.
  starts() { return new Set(this.run.beats.sessions); }

  x(time) {
    const [begin, end] = this.shown();
    return LEFT + (time - begin) / Math.max(1e-9, end - begin) * (this.width - LEFT);
  }

  when(x) {
    const [begin, end] = this.shown();
    return begin + (x - LEFT) / (this.width - LEFT) * (end - begin);
  }

  zoom(to) {
    const [a, b] = [Math.min(this.from, to), Math.max(this.from, to)].map((x) => Math.max(LEFT, x));
    if (b - a > 6) { this.range = [this.when(a), this.when(b)]; this.draw(); }
  }

  draw() {
    if (this.place.hidden) return;
    const {time, actors} = this.run.beats, names = Object.keys(actors);
    this.names = names;
    this.width = Math.max(400, this.place.clientWidth);
    const height = TOP + LANE * Math.max(1, names.length) + 8, scale = devicePixelRatio || 1;
    Object.assign(this.canvas, {width: this.width * scale, height: height * scale});
    this.canvas.style.height = height + "px";
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui";
    if (!time.length) { pen.fillStyle = style("--quiet"); pen.fillText("nothing was seen yet", LEFT, TOP + 14); return; }
    this.axis(pen, height);
    names.forEach((name, lane) => this.lane(pen, name, lane));
    this.versions(pen);
  }

  axis(pen, height) {
    const [begin, end] = this.shown(), start = this.run.beats.time[0];
    const span = end - begin, step = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]
      .find((each) => span / each <= 10) ?? span / 10;
    pen.strokeStyle = style("--line");
    pen.fillStyle = style("--quiet");
    for (let at = Math.ceil((begin - start) / step) * step; at <= end - start; at += step) {
      const x = this.x(start + at);
      pen.beginPath(); pen.moveTo(x, TOP - 4); pen.lineTo(x, height); pen.stroke();
      pen.fillText(at >= 120 ? `${number(at / 60)} min` : `${number(at)} s`, x + 2, 12);
    }
  }

  lane(pen, name, lane) {
    const {time, actors} = this.run.beats, actor = actors[name], y = TOP + lane * LANE, starts = this.starts();
    pen.fillStyle = style("--fore");
    pen.fillText(name, 6, y + 15);
    pen.fillStyle = style("--accent");
    for (let i = 0; i + 1 < time.length; i++) {
      if (actor.pid[i] == null || starts.has(i + 1)) continue;
      const from = Math.max(LEFT, this.x(time[i])), to = Math.min(this.width, this.x(time[i + 1]));
      if (to <= LEFT || from >= this.width) continue;
      pen.globalAlpha = 0.1 + 0.8 * Math.min(1, actor.busy[i] ?? 0);
      pen.fillRect(from, y + 3, Math.max(1, to - from), LANE - 8);
    }
    pen.globalAlpha = 1;
    if (actor.kind === "trainer") this.steps(pen, y);
    pen.fillStyle = dark() ? "#ff8a8a" : "#b91c1c";
    for (let i = 1, last = actor.pid[0]; i < time.length; i++) {
      const pid = actor.pid[i];
      if (starts.has(i)) last = null;
      if (pid != null && last != null && pid !== last && this.x(time[i]) >= LEFT) pen.fillText("✕", this.x(time[i]) - 4, y + 16);
      if (pid != null) last = pid;
    }
  }

  spans() {
    const {step, time, train_step_s: work = [], wait_s: wait = [], turn_wait_s: turn = [], publish_wait_s: publish = []}
      = this.run.steps;
    return (step ?? []).flatMap((number, i) => {
      const end = time[i], begin = end - (work[i] ?? 0), taken = begin - (turn[i] ?? 0);
      return [{begin, end, what: `step ${number}: training`, kind: 0},
        {begin: taken, end: begin, what: `step ${number}: waiting until rollouts sleep`, kind: 1},
        {begin: taken - (wait[i] ?? 0), end: taken, what: `step ${number}: waiting for groups`, kind: 1},
        {begin: end - (publish[i] ?? 0), end, what: `step ${number}: waiting until the version before was read`, kind: 1}]
        .filter((span) => span.end > span.begin);
    });
  }

  steps(pen, y) {
    for (const span of this.spans()) {
      const from = Math.max(LEFT, this.x(span.begin)), to = this.x(span.end);
      if (to < LEFT || from > this.width) continue;
      pen.fillStyle = span.kind ? "#d97706" : "#15803d";
      pen.fillRect(from, y + (span.kind ? 13 : 3), Math.max(0.6, to - from - 0.4), span.kind ? 6 : 10);
    }
  }

  versions(pen) {
    const {time = [], receiver = []} = this.run.loads;
    pen.fillStyle = style("--fore");
    time.forEach((at, i) => {
      const lane = this.names.indexOf(receiver[i]), x = this.x(at);
      if (lane >= 0 && x >= LEFT && x <= this.width) pen.fillText("▾", x - 4, TOP + lane * LANE + 7);
    });
  }

  hover(event) {
    const lane = Math.floor((event.offsetY - TOP) / LANE), name = this.names?.[lane], at = this.when(event.offsetX);
    const {time, actors} = this.run.beats;
    if (!name || event.offsetX < LEFT) return showTip(event, "");
    let i = time.findIndex((value) => value > at) - 1;
    if (i < 0) i = time.length - 1;
    const actor = actors[name], lines = [`${name}, ${number(at - time[0], 4)} s after the start`];
    lines.push(actor.pid[i] == null || this.starts().has(i + 1) ? "not there" : `busy ${number(100 * (actor.busy[i] ?? 0))} %`);
    if (actor.tokens_per_s[i]) lines.push(`${number(actor.tokens_per_s[i])} tokens/s`);
    if (actor.kind === "trainer") lines.push(...this.spans().filter((span) => span.begin <= at && at <= span.end)
      .map((span) => `${span.what}, ${number(span.end - span.begin)} s`));
    return showTip(event, lines.join("\n"));
  }
}
