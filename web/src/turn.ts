// One question with its answer, from the first token to the last.

import { type Citation, type Options, Problem, type Verification } from "./api";
import { comparison } from "./diff";
import { clear, count, h, iconButton, ICONS } from "./dom";
import { isGood, questionField } from "./field";
import { type Details, reportView } from "./report";
import { Markdown } from "./markdown";
import { cards, notes } from "./sources";
import { failure } from "./states";

export type Finish = "stop" | "length" | "stopped" | "failed";

/** An answer, and how it was made. */
export interface Reply {
  answer: string;
  finish: Finish;
  citations: Citation[];
  details: Details | null;
  settings: string;
  options?: Options;
}

/** What is kept of a question. */
export interface Turn extends Reply {
  question: string;
  rating?: Rating | null;
}

export type Rating = "good" | "bad";

export function emptyReply(settings: string, options: Options): Reply {
  return { answer: "", finish: "failed", citations: [], details: null, settings, options };
}

/** What a person may do with an answer. */
export interface Actions {
  again(): void;
  edit(question: string): void;
  check(): void;
  /** Missing where nothing is kept. */
  rated?(): void;
}

/** A turn on the page. */
export class TurnView {
  readonly element: HTMLElement;
  private readonly text = h("div", { class: "answer" });
  private readonly markdown = new Markdown(this.text);
  private drawing = 0;
  private readonly after = h("div", { class: "after" });
  private readonly compared = h("div", { class: "after" });
  private readonly buttons = h("div", { class: "actions" });
  private readonly asked = h("div", { class: "asked" });

  constructor(
    readonly turn: Turn,
    private readonly actions: Actions,
  ) {
    this.element = h(
      "article",
      { class: "turn" },
      this.asked,
      this.text,
      this.after,
    );
    this.showQuestion();
  }

  private showQuestion(): void {
    clear(
      this.asked,
      h("h2", {}, this.turn.question),
      iconButton("Edit the question", ICONS.pencil, () => this.editQuestion()),
    );
  }

  private editQuestion(): void {
    const field = questionField("Edit the question", () => send());
    const send = () => {
      if (isGood(field.input)) this.actions.edit(field.input.value.trim());
    };
    field.input.value = this.turn.question;
    clear(
      this.asked,
      h("h2", { class: "hidden" }, this.turn.question),
      field.element,
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", class: "main", onclick: send }, "Ask"),
        h("button", { type: "button", onclick: () => this.showQuestion() }, "Cancel"),
      ),
    );
    field.input.focus();
    field.resize();
  }

  begin(settings: string, options: Options): void {
    Object.assign(this.turn, emptyReply(settings, options), { rating: null });
    this.showQuestion();
    this.text.setAttribute("aria-busy", "true");
    clear(this.text, h("span", { class: "waiting" }, "Searching and reading"));
    clear(this.after);
    clear(this.compared);
  }

  add(piece: string): void {
    this.turn.answer += piece;
    // Once for all pieces of a frame.
    this.drawing ||= requestAnimationFrame(() => this.draw(true));
  }

  /** Show the passages that were found, before the answer. */
  found(citations: Citation[]): void {
    clear(this.after, citations.length > 0 && cards(citations));
  }

  private draw(isOpen: boolean): void {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const { answer, citations } = this.turn;
    this.markdown.show(answer, isOpen, isOpen ? [] : notes(answer, citations));
  }

  /** Show how the answer ended; the turn says it. */
  end(maxTokens: number): void {
    const { answer, finish, citations } = this.turn;
    this.text.removeAttribute("aria-busy");
    const why = {
      stop: "",
      length: `The answer was cut after ${count(maxTokens, "token")}.`,
      stopped: "You stopped this answer.",
      failed: "This answer was not finished.",
    }[finish];
    const nothing = why ? "" : h("span", { class: "faint" }, "The model said nothing.");
    this.draw(false);
    if (!answer.trim()) clear(this.text, nothing);
    const isCut = finish === "stopped" || finish === "failed";
    clear(
      this.buttons,
      h("button", { type: "button", onclick: () => this.actions.again() }, isCut ? "Try again" : "Ask again"),
      !isCut &&
        h(
          "button",
          {
            type: "button",
            title: "Compute this answer in full, too, and compare",
            onclick: () => this.actions.check(),
          },
          "Check",
        ),
      answer !== "" &&
        h("button", { type: "button", onclick: () => void navigator.clipboard?.writeText(answer) }, "Copy"),
      ...(answer !== "" && this.actions.rated ? this.thumbs(this.actions.rated) : []),
    );
    clear(
      this.after,
      why && h("p", { class: "note" }, why),
      citations.length > 0 && cards(citations),
      this.turn.details && reportView(this.turn.details),
      this.compared,
      this.buttons,
    );
  }

  private thumbs(rated: () => void): HTMLElement[] {
    const { turn } = this;
    const thumb = (label: string, picture: string, value: Rating): HTMLButtonElement =>
      iconButton(label, picture, () => {
        turn.rating = turn.rating === value ? null : value;
        show();
        rated();
      });
    const buttons: [HTMLButtonElement, Rating][] = [
      [thumb("Good answer", ICONS.up, "good"), "good"],
      [thumb("Bad answer", ICONS.down, "bad"), "bad"],
    ];
    const show = () => {
      for (const [button, value] of buttons) {
        button.setAttribute("aria-pressed", String(turn.rating === value));
      }
    };
    show();
    return buttons.map(([button]) => button);
  }

  fail(problem: Problem): void {
    this.turn.finish = "failed";
    this.text.removeAttribute("aria-busy");
    this.draw(false);
    clear(this.after, failure(problem, () => this.actions.again()));
    this.after.scrollIntoView({ block: "nearest" });
  }

  beginCheck(): void {
    clear(this.compared, h("p", { class: "waiting" }, "Computing in full"));
    this.compared.scrollIntoView({ block: "nearest" });
  }

  /** Show what full prefill says; returns it in a sentence. */
  endCheck(found: Verification): string {
    const { answer } = this.turn;
    const tokens = count(found.num_tokens, "token");
    const said = found.is_same
      ? `Full prefill says the same: all ${tokens}.`
      : `Full prefill differs from token ${found.num_same + 1}, and agrees on ${found.num_agreed} of ${tokens}.`;
    clear(
      this.compared,
      h("p", { class: "note" }, said),
      found.answer !== answer &&
        h("p", { class: "note" }, "Asked again, the answer was another: the documents or the settings have changed."),
      found.instead !== null &&
        comparison(
          { label: "This answer", text: found.answer, note: this.turn.settings },
          { label: "Full prefill", text: found.instead, note: "" },
        ),
    );
    this.compared.scrollIntoView({ block: "nearest" });
    return said;
  }

  /** Null: the person stopped it. */
  failCheck(problem: Problem | null): void {
    clear(this.compared, problem && failure(problem, () => this.actions.check()));
  }
}
