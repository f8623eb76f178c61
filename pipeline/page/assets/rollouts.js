// What was trained on: a list of groups that is filtered, and the completions of one of them side by side.
const ROW = 46;
// Tokens of an answer that get elements of their own together.
const PART = 400;
// What tokens can be coloured by: [words, the column that it needs beside the engine's, the value of token i].
const COLOURINGS = {
  logprob: ["the engine's log-probability", null, (member, i) => member.logprob[i]],
  trainer: ["the trainer's", "trainer_logprobs", (member, i, values) => values[i]],
  mismatch: ["trainer less engine", "trainer_logprobs", (member, i, values) => (values[i] == null || member.logprob[i] == null ? null : values[i] - member.logprob[i])],
  advantage: ["advantage", "advantages", (member, i, values) => values[i]],
  reference: ["the reference's", "reference", (member, i, values) => values[i]],
  surprise: ["engine less reference", "reference", (member, i, values) => (values[i] == null || member.logprob[i] == null ? null : member.logprob[i] - values[i])],
  lag: ["age, in versions", null, (member, i) => (member.logprob[i] == null ? null : member.lag[i])],
  none: ["nothing", undefined, () => null],
};
const COLUMN_WORDS = {trainer_logprobs: "trainer's log p", reference: "reference's log p", advantages: "advantage"};

class Rollouts {
  constructor(place, runs, fetchGroups) {
    this.place = place;
    this.runs = runs;
    this.fetchGroups = fetchGroups;
    this.which = 0;
    this.fetching = {};
    this.colouring = "logprob";
    this.chosen = null;
    this.build();
    this.filter();
  }

  build() {
    const redo = () => this.filter();
    this.inputs = {
      text: make("input", {type: "search", id: "search", oninput: redo, size: 22}),
      least: make("input", {type: "number", step: "any", oninput: redo}),
      most: make("input", {type: "number", step: "any", oninput: redo}),
      from: make("input", {type: "number", min: 0, oninput: redo}),
      to: make("input", {type: "number", min: 0, oninput: redo}),
      lag: make("input", {type: "number", min: 0, oninput: redo}),
      long: make("input", {type: "number", min: 0, oninput: redo}),
    };
    const {text, least, most, from, to, lag, long} = this.inputs;
    this.order = make("select", {onchange: redo}, ...[["newest", "newest first"], ["best", "best reward first"],
      ["worst", "worst reward first"], ["spread", "most different rewards first"], ["longest", "longest first"]]
      .map(([value, words]) => make("option", {value}, words)));
    this.runPick = make("select", {onchange: () => { this.which = +this.runPick.value; this.filter(); this.show(); }},
      ...this.runs.map((run, index) => make("option", {value: index}, run.name)));
    const labelled = (words, ...nodes) => make("label", {}, words, ...nodes);
    this.count = make("span", {role: "status", class: "about"});
    const filters = make("div", {class: "filters"}, ...(this.runs.length > 1 ? [labelled("run", this.runPick)] : []),
      labelled("text (/)", text), labelled("reward from", least), labelled("to", most), labelled("step from", from),
      labelled("to", to), labelled("lag at least", lag), labelled("tokens at least", long), labelled("order", this.order),
      ...(this.fetchGroups ? [make("button", {onclick: () => this.refresh()}, "look again")] : []), this.count);
    this.rows = make("div");
    this.list = make("div", {class: "list", role: "listbox", "aria-label": "Groups", tabindex: "0"}, this.rows);
    this.list.addEventListener("scroll", () => this.paint());
    this.list.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); this.move(event.key === "ArrowDown" ? 1 : -1); }
    });
    this.detail = make("div", {"aria-live": "polite"});
    this.place.replaceChildren(filters, make("div", {class: "split"}, this.list, this.detail));
    addEventListener("resize", () => this.paint());
  }

  async refresh() {
    const which = this.which;
    try {
      this.runs[which].groups = await this.fetchGroups(which);
    } catch (error) {
      this.count.textContent = error.message;
      return;
    }
    if (which === this.which) this.filter();
  }

  show() {
    const which = this.which;
    if (this.fetchGroups && !this.runs[which].groups.length) {  // once, however often it is shown meanwhile
      this.fetching[which] ??= this.refresh().finally(() => { this.fetching[which] = null; });
    }
    this.paint();
  }

  filter() {
    const value = (input) => (input.value === "" ? null : +input.value), words = this.inputs.text.value.toLowerCase();
    const [least, most] = [value(this.inputs.least), value(this.inputs.most)];
    const [from, to, lag, long] = ["from", "to", "lag", "long"].map((name) => value(this.inputs[name]));
    const within = (reward) => reward != null && (least == null || reward >= least) && (most == null || reward <= most);
    const fits = (group, member) => ((least == null && most == null) || within(member.reward))
      && (lag == null || (member.version_min != null && group.step - member.version_min >= lag)) && (long == null || member.sampled >= long)
      && (!words || (member.response + "\n" + group.prompt).toLowerCase().includes(words));
    const rewards = (group) => group.members.map((member) => member.reward).filter((reward) => reward != null);
    const key = {newest: (group) => -group.step * 1e6 - group.group, best: (group) => -Math.max(...rewards(group)),
      worst: (group) => Math.min(...rewards(group)), longest: (group) => -Math.max(...group.members.map((m) => m.sampled)),
      spread: (group) => Math.min(...rewards(group)) - Math.max(...rewards(group))}[this.order.value];
    this.found = (this.runs[this.which].groups ?? []).filter((group) => (from == null || group.step >= from)
      && (to == null || group.step <= to) && group.members.some((member) => fits(group, member)))
      .map((group) => [key(group), group]).sort((a, b) => a[0] - b[0]).map(([, group]) => group);
    this.fits = fits;
    this.count.textContent = `${number(this.found.length)} of ${number(this.runs[this.which].groups?.length ?? 0)} groups`;
    this.rows.style.height = this.found.length * ROW + "px";
    this.list.scrollTop = 0;
    this.paint();
    if (!this.found.includes(this.chosen)) {  // what was read again is the same group, as another object
      const same = (group) => group.step === this.chosen?.step && group.group === this.chosen?.group;
      this.choose(this.found.find(same) ?? this.found[0] ?? null);
    }
  }

  paint() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
    const last = Math.min(this.found.length, first + Math.ceil((this.list.clientHeight || 600) / ROW) + 8);
    this.rows.replaceChildren(...this.found.slice(first, last).map((group, place) => {
      const rewards = group.members.map((member) => member.reward).filter((value) => value != null);
      const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
      const row = make("div", {class: "row", role: "option", "aria-selected": group === this.chosen,
        onclick: () => this.choose(group)}, make("div", {}, group.prompt.replaceAll("\n", " ⏎ ").slice(-90)),
      make("small", {}, `step ${group.step} · group ${group.group} · reward ${number(mean)} · ${group.members.length} answers`));
      row.setAttribute("aria-selected", String(group === this.chosen));
      row.style.top = (first + place) * ROW + "px";
      return row;
    }));
  }

  move(by) {
    const next = this.found[this.found.indexOf(this.chosen) + by];
    if (!next) return;
    const top = this.found.indexOf(next) * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    this.choose(next);
  }

  choose(group) {
    this.chosen = group;
    this.paint();
    this.unseen?.disconnect();
    this.unseen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      this.unseen.unobserve(entry.target);
      entry.target.build();
    }), {rootMargin: "200px"});
    if (!group) {
      this.detail.replaceChildren(make("p", {class: "about"}, this.runs[this.which].groups?.length
        ? "nothing fits these filters" : "no rollouts are kept yet: replay.samples and replay.archive say which are"));
      return;
    }
    const kinds = Object.entries(COLOURINGS).filter(([, [, needs]]) => needs === undefined
      || group.members.some((member) => (needs === null ? member.tokens : member.by_token?.[needs]))).map(([kind]) => kind);
    if (!kinds.includes(this.colouring)) this.colouring = kinds[0];
    const untold = group.untold ?? "tokens are there for steps that replay.archive keeps";
    const buttons = kinds.length < 2 ? [make("span", {class: "about"}, untold)]
      : kinds.map((kind) => make("button", {"aria-pressed": String(kind === this.colouring),
        onclick: () => { this.colouring = kind; this.choose(group); }}, COLOURINGS[kind][0]));
    const truth = group.truth == null ? "" : typeof group.truth === "string" ? group.truth : JSON.stringify(group.truth);
    this.alike = alike(group);
    this.detail.replaceChildren(make("h2", {}, `Step ${group.step}, group ${group.group}`),
      make("div", {class: "text given"}, group.prompt), this.asked(group), this.seen(group, this.alike),
      make("p", {class: "about"}, truth ? `truth: ${truth}` : ""),
      make("div", {class: "filters"}, make("span", {class: "about"}, "colour by"), ...buttons),
      make("div", {class: "members"}, ...group.members.filter((member) => member.parent == null)
        .map((member) => this.tree(group, member))));
  }

  // An agent's session: its first conversation, and below it the branches that go on from it.
  tree(group, member) {
    const box = this.member(group, member);
    if (member.session != null) box.querySelector("h3").prepend(`session ${member.session}, `);
    for (const branch of group.members.filter((other) => other.parent === member.sample)) {
      const words = branch.shared ? `branches off after ${number(branch.shared)} tokens` : "begins another conversation";
      box.append(make("details", {class: "branch", open: true}, make("summary", {}, words), this.tree(group, branch)));
    }
    return box;
  }

  // What the policy read before its first answer, as tokens: in the chat template, or as an environment has begun.
  asked(from) {
    if (!from.asked) return "";
    return make("details", {class: "asked"}, make("summary", {class: "about"}, "as the policy read it"),
      make("div", {class: "text given"}, from.asked));
  }

  seen(group, names) {
    const shown = names.map((name) => (group.seen?.[name] ? make("img", {src: group.seen[name], alt: name, title: name})
      : make("span", {class: "about"}, `picture ${name}`)));
    return shown.length ? make("div", {class: "seen"}, ...shown) : "";
  }

  member(group, member) {
    const rewards = Object.entries(member).filter(([name, value]) => name.includes("/") && value != null)
      .map(([name, value]) => `${name.split("/").slice(1).join("/")} ${number(value)}`);
    const lag = member.version_min == null ? "" : ` · lag ${group.step - member.version_max}`
      + (member.version_max > member.version_min ? `–${group.step - member.version_min}` : "");
    const about = `${number(member.sampled)} tokens · ${member.finish}${lag}` + (rewards.length ? ` · ${rewards.join(", ")}` : "");
    const box = make("article", {class: "member"}, make("h3", {}, `${member.sample}: reward ${number(member.reward)}`),
      make("p", {class: "about"}, about), this.asked(member),
      this.seen(group, (member.pictures ?? []).slice(this.alike.length)), this.text(member));
    if (member.failure) box.append(make("p", {class: "about"}, "failed: " + member.failure));
    if (!this.fits(group, member)) box.classList.add("other");
    return box;
  }

  text(member) {
    if (!member.tokens) return make("div", {class: "text"}, member.response || "(nothing)");
    const box = make("div", {class: "text"}), {logprob, lag, by_token: columns = {}} = member;
    const several = member.mask.join("").replace(/^0+/, "").includes("01");  // more than one turn: each a block
    const apart = several || member.parent != null, first = !member.mask[0] && member.parent == null ? 1 : 0;  // the prompt's last
    for (let i = first, block = box, end; i < member.tokens.length; i = end) {
      if (apart && (i === first || member.mask[i] !== member.mask[i - 1])) {
        block = make("div", {class: member.mask[i] ? "turn said" : "turn heard", title: member.mask[i] ? "the policy" : "read by it"});
        box.append(block);
      }
      end = i + 1;
      while (end < member.tokens.length && end < i + PART && (!apart || member.mask[end] === member.mask[i])) end++;
      block.append(this.part(member, i, end));
    }
    box.addEventListener("mousemove", (event) => {
      const i = event.target.dataset?.i;
      if (i == null) return showTip(event, "");
      if (!member.mask[i]) return showTip(event, "not sampled: no loss");
      const sampled = logprob[i] != null;  // else it was given: no engine has said anything of it
      const lines = sampled ? [`log p ${number(logprob[i])} (p ${number(Math.exp(logprob[i]))})`, `${number(lag[i])} versions old`]
        : ["given: nobody sampled it"];
      for (const [name, values] of Object.entries(columns)) lines.push(`${COLUMN_WORDS[name] ?? name} ${number(values[i])}`);
      const trainer = columns.trainer_logprobs;
      if (sampled && trainer?.[i] != null) lines.push(`ratio, trainer to engine: ${number(Math.exp(trainer[i] - logprob[i]))}`);
      if (sampled && trainer && trainer[i] == null) lines.push("no reward: no loss");
      return showTip(event, lines.join("\n"));
    });
    box.addEventListener("mouseleave", (event) => showTip(event, ""));
    return box;
  }

  // Tokens from one to another: text at first, and an element each once somebody sees it.
  part(member, from, to) {
    const {by_token: columns = {}} = member, [, needs, value] = COLOURINGS[this.colouring], colouring = this.colouring;
    const found = (i) => (needs && !columns[needs] ? null : value(member, i, columns[needs]));
    const part = make("span", {class: "part"}, member.tokens.slice(from, to).join(""));
    part.build = () => part.replaceChildren(...member.tokens.slice(from, to).map((token, place) => {
      const span = document.createElement("span"), i = from + place;
      span.textContent = token;
      if (!member.mask[i]) span.className = "given";
      else span.style.background = shade(colouring, found(i));
      span.dataset.i = i;
      return span;
    }));
    this.unseen.observe(part);
    return part;
  }
}

// The pictures that all answers to a prompt were shown first.
function alike(group) {
  const [first, ...others] = group.members.map((member) => member.pictures ?? []);
  const end = first.findIndex((name, place) => others.some((names) => names[place] !== name));
  return end < 0 ? first : first.slice(0, end);
}

// Never so dark that the text on it is hard to read.
const tint = (rgb, strength) => `rgb(${rgb} / ${Math.min(0.38, strength)})`;

function shade(kind, value) {
  if (value == null) return "";
  if (kind === "lag") return value ? tint("217 119 6", 0.12 * value) : "";
  const full = {surprise: 6, advantage: 5, mismatch: 1.5}[kind];  // where both signs have a colour of their own
  if (full) return value > 0 ? tint("21 128 61", value / full) : tint("185 28 28", -value / full);
  return tint("185 28 28", -value / 10);  // the less likely, the redder
}
