// Elements without markup: texts of documents and answers only ever become text nodes.

type Child = Node | string | number | null | undefined | false;
type Props = Record<string, unknown>;

const SVG = "http://www.w3.org/2000/svg";

function fill(element: Element, props: Props, children: Child[]): void {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value as EventListener);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.filter((one) => one || one === 0).map((one) => one as Node | string));
}

/** An element with attributes, listeners (`onclick`) and children. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  fill(element, props, children);
  return element;
}

/** The same for SVG. */
export function svg(tag: string, props: Props = {}, ...children: Child[]): SVGElement {
  const element = document.createElementNS(SVG, tag);
  fill(element, props, children);
  return element as SVGElement;
}

/** A drawing of 16 by 16 for a button whose label says what it does. */
export function icon(path: string): SVGElement {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" },
    svg("path", { d: path }),
  );
}

export const ICONS = {
  close: "M4 4l8 8M12 4l-8 8",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  send: "M8 13V3.5M4 7l4-4 4 4",
  stop: "M5 5h6v6H5z",
  plus: "M8 3v10M3 8h10",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2v3h-3",
  trash: "M3 4.5h10M6.5 4V2.5h3V4M4.5 4.5l.5 9h6l.5-9",
  pencil: "M3 13l.7-2.8 7-7 2.1 2.1-7 7z",
  dots: "M3.5 8h.01M8 8h.01M12.5 8h.01",
  up: "M5 7.5v6H2.5v-6zM5 7.5l3-5c1.2 0 1.7.8 1.5 2L9 6.5h3.5l.7.9-1 5-1 1.1H5",
  down: "M5 8.5v-6H2.5v6zM5 8.5l3 5c1.2 0 1.7-.8 1.5-2L9 9.5h3.5l.7-.9-1-5-1-1.1H5",
  file: "M4 2h5l3 3v9H4zM9 2v3h3",
};

/** A button with a picture alone; `label` is its name for everybody else. */
export function iconButton(
  label: string,
  path: string,
  onclick: (event: Event) => void,
  props: Props = {},
): HTMLButtonElement {
  return h(
    "button",
    { type: "button", class: "quiet", "aria-label": label, title: label, onclick, ...props },
    icon(path),
  );
}

export function clear(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  fill(element, {}, children);
}

export function count(number: number, noun: string): string {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function seconds(value: number): string {
  if (value < 0.0005) return "0 ms";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}

export function bytes(value: number): string {
  if (value < 1000) return `${value} B`;
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : `${(value / 1e6).toFixed(1)} MB`;
}

/** A text without the line ends that an editor put into its paragraphs; lists keep theirs. */
export function reflowed(text: string): string {
  return text.replace(/^(.{50,})\n(?=[\p{L}\p{N}“"'(£$€](?!\d*[.)]\s))/gmu, "$1 ");
}
