// The passages that an answer was read from: numbered cards, and a drawer with the document.

import { getJSON, type Citation, type Passages, Problem } from "./api";
import { drawer } from "./dialogs";
import { clear, count, h, reflowed } from "./dom";
import type { Note } from "./markdown";
import { failure } from "./states";

const FEW = 3;
const MOST = 20;
const SNIPPET = 180;

/** Each passage once; a place of a passage is best shown with a sentence that rests on it. */
export function cards(citations: Citation[]): HTMLElement {
  const once = [...numbers(citations).keys()].map(
    (id) => citations.find((one) => one.chunk_id === id)!,
  );
  return h(
    "section",
    { class: "sources" },
    h("h3", {}, "Read from, best match first"),
    h("ol", {}, ...once.map((one, number) => h("li", {}, card(one, number + 1)))),
  );
}

/** The passages' numbers. */
function numbers(citations: Citation[]): Map<string, number> {
  const found = new Map<string, number>();
  for (const { chunk_id } of citations) {
    if (!found.has(chunk_id)) found.set(chunk_id, found.size + 1);
  }
  return found;
}

/** The numbers after the sentences that rest on passages, in the answer's order. */
export function notes(answer: string, citations: Citation[]): Note[] {
  const characters = [...answer]; // the server counts these
  const found = numbers(citations);
  return citations
    .filter((one) => one.best)
    .sort((one, other) => one.end_index - other.end_index)
    .map((one) => ({
      at: characters.slice(0, one.end_index).join("").length,
      element: () => {
        const number = found.get(one.chunk_id)!;
        const label = `Source ${number}: ${one.title}, passage ${one.ordinal + 1}`;
        return h(
          "button",
          { type: "button", class: "cite", title: label, "aria-label": label, onclick: () => void open(one, number) },
          number,
        );
      },
    }));
}

/** A passage's text, in which what is cited is marked. */
function markedText({ best, text }: Citation, number: number): HTMLElement {
  const characters = [...text];
  const [start, end] = best ?? [0, characters.length];
  const part = (from: number, to?: number) => characters.slice(from, to).join("");
  const shown = [...reflowed(text)];
  if (shown.length === characters.length) characters.splice(0, characters.length, ...shown);
  return h(
    "p",
    {},
    part(0, start),
    h("mark", {}, h("span", { class: "hidden" }, `Source ${number}: `), part(start, end)),
    part(end),
  );
}

function card(one: Citation, number: number): HTMLElement {
  const snippet = one.text.replace(/[#*_`|\s]+/g, " ").trim().slice(0, SNIPPET);
  return h(
    "button",
    { type: "button", class: "card", onclick: () => void open(one, number) },
    h("span", { class: "number" }, number),
    h(
      "span",
      { class: "card-text" },
      h("span", { class: "title" }, one.title, h("span", { class: "faint" }, `, passage ${one.ordinal + 1}`)),
      h("span", { class: "snippet" }, snippet),
    ),
  );
}

/** Show a chunk in its document, with the chunks around it. */
async function open(one: Citation, number: number): Promise<void> {
  const { dialog, body } = drawer(one.title);
  let around = FEW;

  async function show(): Promise<void> {
    body.setAttribute("aria-busy", "true");
    const path = `v1/kvrag/chunks/${encodeURIComponent(one.chunk_id)}?around=${around}`;
    let found: Passages;
    try {
      found = await getJSON<Passages>(path);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      clear(body, failure(error, () => void show()));
      return;
    } finally {
      body.removeAttribute("aria-busy");
    }
    if (dialog.open) fill(found);
  }

  function more(label: string): HTMLElement {
    return h(
      "button",
      {
        type: "button",
        class: "more",
        onclick: () => {
          around = Math.min(MOST, around + 5);
          void show();
        },
      },
      label,
    );
  }

  function fill(found: Passages): void {
    const first = found.passages[0].ordinal;
    const last = found.passages[found.passages.length - 1].ordinal;
    const canGrow = around < MOST;
    const texts = found.passages.map((passage) => {
      const isCited = passage.chunk_id === found.chunk_id;
      const place = [
        `Passage ${passage.ordinal + 1}`,
        passage.page === null ? "" : `page ${passage.page}`,
        passage.heading ?? "",
      ];
      return h(
        "section",
        { class: isCited ? "passage cited" : "passage" },
        h("p", { class: "place" }, place.filter(Boolean).join(" · ")),
        isCited
          ? markedText({ ...one, text: passage.text }, number)
          : h("p", {}, reflowed(passage.text)),
      );
    });
    clear(
      body,
      h(
        "details",
        { class: "faint" },
        h("summary", {}, `${count(found.num_chunks, "passage")} in this document`),
        h("p", { class: "source" }, found.source),
      ),
      canGrow && first > 0 && more("Show what comes before"),
      ...texts,
      canGrow && last < found.num_chunks - 1 && more("Show what comes after"),
    );
    body.querySelector(".cited mark")?.scrollIntoView({ block: "center" });
  }

  clear(body, h("p", { class: "waiting" }, "Opening the document"));
  await show();
}
