// What the views share: making elements, numbers for people, colours, a tip beside the pointer.
const COLOURS = ["#1769aa", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0f766e", "#a16207", "#be185d"];
const LIGHT = ["#6cb6ff", "#ff9d66", "#6ee7a0", "#cf9bff", "#ff8a8a", "#5eead4", "#f3cf6b", "#ff9ac6"];
const dark = () => document.documentElement.classList.contains("dark");
const colour = (number) => (dark() ? LIGHT : COLOURS)[number % COLOURS.length];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(kind, attributes = {}, ...children) {
  const node = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// With so many significant digits, but never fewer than the whole number has.
function number(value, digits = 4) {
  if (value == null || typeof value === "boolean") return String(value ?? "–");
  if (typeof value !== "number") return String(value);
  if (Math.abs(value) >= 1000) {
    const whole = Math.trunc(Math.abs(value)).toString().length;
    return value.toLocaleString("en", {maximumFractionDigits: Math.max(0, digits - whole)});
  }
  return Number(value.toPrecision(digits)).toLocaleString("en", {maximumSignificantDigits: digits});
}

// Of an axis: with as many digits as tell two ticks apart that lie one step from each other.
function ticks(values, step) {
  const whole = (value) => Math.abs(value - Math.round(value)) < 1e-6 * value;
  let digits = 0;
  while (digits < 20 && !whole(step * 10 ** digits)) digits++;
  return values.map((value) => (digits > 6 ? String(Number(value.toFixed(digits)))
    : value.toLocaleString("en", {maximumFractionDigits: digits})));
}

const tip = make("div", {class: "tip", hidden: true, role: "tooltip"});
document.body.append(tip);
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}
