// Making elements and writing numbers. All text goes in as text nodes, never as markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const figure = (value, label) => el("span", { class: "figure" }, el("b", {}, value), ` ${label}`);

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// As `memstore stats` writes them.
export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let size = count, unit = 0;
  while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${unit ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export const count = (number) => number.toLocaleString("en");
export const percent = (part) => `${Math.round(part * 100)}%`;
export const seconds = (time) => (time < 10 ? `${time.toFixed(2)} s` : `${Math.round(time)} s`);
export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

export function when(time) {
  const at = new Date(time * 1000), two = (part) => String(part).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

// Arrow keys move among elements of which one is in the order of Tab: `step` gives the next one's
// number, or null.
export function roving(nodes, step) {
  nodes.forEach((node, number) => {
    node.tabIndex = number ? -1 : 0;
    node.addEventListener("keydown", (event) => {
      const next = step(number, event.key);
      if (next === null || next < 0 || next >= nodes.length) return;
      event.preventDefault();
      for (const other of nodes) other.tabIndex = -1;
      nodes[next].tabIndex = 0;
      nodes[next].focus();
    });
  });
}
