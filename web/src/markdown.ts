// Markdown of answers as elements. Texts only become text nodes, and links are not live.

import { h, reflowed } from "./dom";

const FENCE = /^ {0,3}(```|~~~)/;
const HEADING = /^#{1,6}\s+(.*)$/;
const ITEM = /^(\s*)([-*+•]|\d{1,3}[.)])\s+(.*)$/;
const RULE = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/; // of a trimmed line: white space at its ends would take long
const QUOTE = /^\s*>\s?/;

// What stands for a note in the text: characters that no text has.
const OPEN = "\uFDD0";
const CLOSE = "\uFDD1";
const NOTE = new RegExp(`${OPEN}(\\d+)${CLOSE}`);

// What begins a span, and what may end it. Each is sought once at most where there is none, so that the time is linear.
const OPENING = /`+|(?:\*\*|__)(?=\S)|(?:\*|(?<![\p{L}\p{N}])_)(?=[^\s*_])/gu;
const CLOSING: Record<string, RegExp> = {
  "`": /`+/g,
  "**": /(?<=\S)\*\*/g,
  __: /(?<=\S)__/g,
  "*": /(?<=[^\s*_])\*(?![\p{L}\p{N}])/gu,
  _: /(?<=[^\s*_])_(?![\p{L}\p{N}])/gu,
};

/** What stands at a place of the text. */
export interface Note {
  at: number;
  element(): HTMLElement;
}

/** Shows a text that grows: blocks that did not change stay as they are. */
export class Markdown {
  private shown: string[] = [];

  constructor(private readonly element: HTMLElement) {}

  /** Show a text; `isOpen`: more of it will come. */
  show(text: string, isOpen: boolean, notes: Note[] = []): void {
    const found = blocks(noted(text, notes));
    const { children } = this.element;
    if (children.length !== this.shown.length) {
      this.element.replaceChildren();
      this.shown = [];
    }
    // What an open block has left out or added counts, too: it may be closed without another change.
    const keys = found.map((lines, number) => [isOpen && number === found.length - 1, ...lines].join("\n"));
    found.forEach((lines, number) => {
      if (this.shown[number] === keys[number] && !(number === found.length - 1 && !isOpen)) return;
      const node = block(lines, isOpen && number === found.length - 1, notes);
      if (children[number]) children[number].replaceWith(node);
      else this.element.append(node);
    });
    while (children.length > found.length) children[found.length].remove();
    this.shown = keys;
  }
}

function noted(text: string, notes: Note[]): string {
  let left = text.replace(/[\uFDD0\uFDD1]/g, "\uFFFD");
  for (let number = notes.length - 1; number >= 0; number -= 1) {
    let before = left.slice(0, notes[number].at);
    // A row of a table keeps its last line.
    if (before.trimEnd().endsWith("|")) before = before.trimEnd().slice(0, -1).trimEnd();
    left = before + OPEN + number + CLOSE + left.slice(before.length);
  }
  return left;
}

/** The lines of each block. */
function blocks(text: string): string[][] {
  const lines = text.split("\n");
  const found: string[][] = [];
  for (let at = 0; at < lines.length; ) {
    const begin = at;
    const line = lines[at++];
    if (!line.trim()) continue;
    const fence = FENCE.exec(line)?.[1];
    if (fence) {
      while (at < lines.length && !lines[at].trimStart().startsWith(fence)) at += 1;
      at += 1;
    } else if (isTable(lines, begin)) {
      while (at < lines.length && lines[at].includes("|")) at += 1;
    } else if (ITEM.test(line)) {
      while (at < lines.length && goesOn(lines, at)) at += 1;
    } else if (QUOTE.test(line)) {
      while (at < lines.length && QUOTE.test(lines[at])) at += 1;
    } else if (!HEADING.test(line)) {
      while (at < lines.length && lines[at].trim() && !begins(lines, at)) at += 1;
    }
    found.push(lines.slice(begin, at));
  }
  return found;
}

function isTable(lines: string[], at: number): boolean {
  const next = lines[at + 1] ?? "";
  return lines[at].includes("|") && next.includes("|") && RULE.test(next.trim());
}

function begins(lines: string[], at: number): boolean {
  return [FENCE, HEADING, ITEM, QUOTE].some((one) => one.test(lines[at])) || isTable(lines, at);
}

/** Whether a line belongs to the list before it. */
function goesOn(lines: string[], at: number): boolean {
  if (ITEM.test(lines[at])) return true;
  if (lines[at].trim()) return lines[at - 1].trim() !== "" && !begins(lines, at);
  return ITEM.test(lines[at + 1] ?? "");
}

function block(lines: string[], isOpen: boolean, notes: Note[]): HTMLElement {
  const inline = (text: string) => spans(isOpen ? closed(text) : text, notes);
  const [first] = lines;
  const fence = FENCE.exec(first)?.[1];
  if (fence) {
    const isClosed = lines.length > 1 && lines[lines.length - 1].trimStart().startsWith(fence);
    const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    return h("pre", { tabindex: "0" }, h("code", {}, ...leaf(code, notes)));
  }
  const heading = HEADING.exec(first);
  if (heading) return h("h3", {}, ...inline(heading[1]));
  if (isTable(lines, 0)) return table(lines, inline);
  if (ITEM.test(first)) return list(lines, inline);
  if (QUOTE.test(first)) {
    return h("blockquote", {}, ...inline(lines.map((line) => line.replace(QUOTE, "")).join("\n")));
  }
  return h("p", {}, ...inline(reflowed(lines.join("\n"))));
}

type Inline = (text: string) => (Node | string)[];

function table(lines: string[], inline: Inline): HTMLElement {
  const rows = [lines[0], ...lines.slice(2)].map((line) =>
    line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim())),
  );
  const row = (cells: (Node | string)[][], tag: "th" | "td") =>
    h("tr", {}, ...cells.map((cell) => h(tag, {}, ...cell)));
  return h(
    "div",
    { class: "wide-table", tabindex: "0", role: "region", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, row(rows[0], "th")),
      h("tbody", {}, ...rows.slice(1).map((cells) => row(cells, "td"))),
    ),
  );
}

function list(lines: string[], inline: Inline): HTMLElement {
  const open: { indent: number; list: HTMLElement }[] = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      if (line.trim()) open[open.length - 1].list.lastElementChild!.append(" ", ...inline(line.trim()));
      continue;
    }
    const indent = item[1].length;
    while (open.length > 1 && indent < open[open.length - 1].indent) open.pop();
    const top = open[open.length - 1];
    if (!top || indent > top.indent + 1) {
      const number = parseInt(item[2], 10);
      const made = Number.isNaN(number) ? h("ul") : h("ol", { start: number });
      top?.list.lastElementChild!.append(made);
      open.push({ indent, list: made });
    }
    open[open.length - 1].list.append(h("li", {}, ...inline(item[3])));
  }
  return open[0].list;
}

/** A text that is not finished, with the ends of what it has begun. */
function closed(text: string): string {
  let end = text.length;
  while (end && "*_`".includes(text[end - 1])) end -= 1;
  let left = text.slice(0, end);
  for (const mark of ["**", "`"]) {
    if (left.split(mark).length % 2 === 0) left += mark;
  }
  return left;
}

function spans(text: string, notes: Note[]): (Node | string)[] {
  const made: (Node | string)[] = [];
  const unclosed = new Set<string>();
  let at = 0;
  for (let from = 0, opening; (opening = next(OPENING, text, from)); ) {
    const [mark] = opening;
    const isCode = mark.startsWith("`");
    const kind = isCode ? "`" : mark;
    const begin = opening.index + mark.length;
    const closing = unclosed.has(kind) ? null : next(CLOSING[kind], text, begin + 1);
    if (!closing) {
      unclosed.add(kind);
      from = isCode ? begin : opening.index + 1; // the second of two stars may begin another span
      continue;
    }
    const length = Math.min(mark.length, closing[0].length);
    const inner = text.slice(begin, closing.index);
    made.push(...leaf(text.slice(at, begin - length), notes));
    if (isCode) made.push(h("code", {}, ...leaf(inner, notes)));
    else made.push(h(mark.length > 1 ? "strong" : "em", {}, ...spans(inner, notes)));
    from = closing.index + length;
    at = from;
  }
  return [...made, ...leaf(text.slice(at), notes)];
}

function next(pattern: RegExp, text: string, from: number): RegExpExecArray | null {
  pattern.lastIndex = from;
  return pattern.exec(text);
}

/** A text with its notes. */
function leaf(text: string, notes: Note[]): (Node | string)[] {
  return text.split(NOTE).map((one, at) => (at % 2 ? notes[Number(one)].element() : one));
}
