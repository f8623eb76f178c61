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

function number(value, digits = 3) {
  if (value == null || typeof value === "boolean") return String(value ?? "–");
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en",
    {maximumSignificantDigits: digits});
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
