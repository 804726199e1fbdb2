// Dialogs over the page: the key, questions with two answers, and the drawer at the side.

import { h, iconButton, ICONS } from "./dom";

/** Show a dialog; the promise is kept when it closes, with the value of the button. */
function shown(dialog: HTMLDialogElement): Promise<string> {
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

/** A dialog's buttons. No form is sent: the page's policy forbids that, and nothing needs it. */
function choices(dialog: HTMLDialogElement, yes: string, isGrave: boolean): HTMLElement {
  return h(
    "div",
    { class: "choices" },
    h("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
    h(
      "button",
      { type: "button", class: isGrave ? "grave" : "main", onclick: () => dialog.close("yes") },
      yes,
    ),
  );
}

function fresh(title: string): HTMLDialogElement {
  // Escape closes with "", whatever an earlier dialog has returned.
  return h("dialog", { class: "small", "aria-label": title }, h("h2", {}, title));
}

export async function confirmed(title: string, text: string, yes: string): Promise<boolean> {
  const dialog = fresh(title);
  dialog.append(h("p", {}, text), choices(dialog, yes, true));
  return (await shown(dialog)) === "yes";
}

/** Ask for one line of text; null if the person cancels. */
export async function asked(
  title: string,
  label: string,
  value: string,
  yes: string,
  isSecret = false,
  note = "",
): Promise<string | null> {
  const dialog = fresh(title);
  const input = h("input", {
    id: "asked",
    type: isSecret ? "password" : "text",
    autocomplete: "off",
    maxlength: 500,
    onkeydown: (event: KeyboardEvent) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // or the button that gets the focus back is pressed too
      dialog.close("yes");
    },
  });
  input.value = value;
  dialog.append(
    h("label", { for: "asked" }, label),
    input,
    note ? h("p", { class: "faint" }, note) : "",
    choices(dialog, yes, false),
  );
  const closed = shown(dialog);
  input.select();
  return (await closed) === "yes" ? input.value.trim() || null : null;
}

/** A drawer at the side of the page, or a small dialog in its middle. */
export function drawer(title: string, isSmall = false): { dialog: HTMLDialogElement; body: HTMLElement } {
  const body = h("div", { class: "drawer-body", tabindex: "0", role: "region", "aria-label": title });
  const dialog: HTMLDialogElement = h(
    "dialog",
    {
      class: isSmall ? "drawer small" : "drawer",
      "aria-label": title,
      onclick: (event: Event) => {
        if (event.target === dialog) dialog.close();
      },
    },
    h(
      "header",
      {},
      h("h2", {}, title),
      iconButton("Close", ICONS.close, () => dialog.close()),
    ),
    body,
  );
  void shown(dialog);
  return { dialog, body };
}
