// What the page shows instead of content: errors and empty places.

import { Problem } from "./api";
import { h } from "./dom";

/** An error, in words, with what to do; `again` tries again, after the time the server asks for. */
export function failure(problem: Problem, again?: () => void): HTMLElement {
  const text = h("p", {}, sentence(problem.message));
  const box = h("div", { class: "failure", role: "alert" }, text);
  if (!again || (problem.status >= 400 && problem.status < 500 && problem.status !== 429)) return box;
  const button = h("button", { type: "button", onclick: again }, "Try again");
  box.append(button);
  if (problem.retryAfter !== null) countDown(button, problem.retryAfter);
  return box;
}

function countDown(button: HTMLButtonElement, left: number): void {
  button.disabled = left > 0;
  button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
  if (left > 0) setTimeout(() => countDown(button, left - 1), 1000);
}

function sentence(text: string): string {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

export function emptyPlace(title: string, ...children: (Node | string)[]): HTMLElement {
  return h("div", { class: "empty" }, h("h1", {}, title), ...children);
}
