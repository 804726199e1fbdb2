// The field in which a question is written, or written again.

import { h } from "./dom";

const MOST = 20000;

/** A field that grows with its text and says when that is too long; Enter sends. */
export function questionField(
  label: string,
  send: () => void,
  ...more: Node[]
): { element: HTMLElement; input: HTMLTextAreaElement; resize: () => void } {
  const warning = h("p", { class: "note", role: "alert", hidden: true });
  const resize = () => {
    input.style.height = "auto";
    const wanted = input.scrollHeight; // 0 before the page shows it
    if (wanted > 0) input.style.height = `${Math.min(wanted, 200)}px`;
    const { length } = input.value.trim();
    const said =
      length > MOST
        ? `This has ${length.toLocaleString("en")} characters, and a question may have ${MOST.toLocaleString("en")}. Shorten it, or add the text as a document.`
        : "";
    warning.hidden = said === "";
    if (warning.textContent !== said) warning.textContent = said;
  };
  const input = h("textarea", {
    rows: 1,
    "aria-label": label,
    placeholder: "Ask a question",
    oninput: resize,
    onkeydown: (event: KeyboardEvent) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    },
  });
  return { element: h("div", {}, warning, h("div", { class: "field" }, input, ...more)), input, resize };
}

/** Whether a question can be sent; if not, the field gets the focus. */
export function isGood(input: HTMLTextAreaElement): boolean {
  const { length } = input.value.trim();
  const good = length > 0 && length <= MOST;
  if (!good) input.focus();
  return good;
}
