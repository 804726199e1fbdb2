// The conversation, and the field to ask in.

import { type About, ask, type Message, Problem } from "./api";
import { clear, count, h, icon, ICONS } from "./dom";
import { emptyPlace } from "./states";
import { type Turn, TurnView } from "./turn";

/** The view in which questions are asked. */
export class Asking {
  readonly element: HTMLElement;
  private readonly thread = h("div", { class: "thread" });
  private readonly field: HTMLTextAreaElement;
  private readonly button: HTMLButtonElement;
  private turns: TurnView[] = [];
  private running: AbortController | null = null;

  constructor(
    private readonly about: About,
    private readonly announce: (text: string) => void,
  ) {
    this.field = h("textarea", {
      id: "question",
      rows: 1,
      maxlength: 20000,
      placeholder: "Ask a question",
      oninput: () => this.resize(),
      onkeydown: (event: KeyboardEvent) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        if (!this.running) this.send();
      },
    });
    this.button = h("button", { type: "button", class: "main round", onclick: () => this.press() });
    this.element = h(
      "div",
      { class: "asking" },
      this.thread,
      h(
        "div",
        { class: "composer" },
        h(
          "div",
          { class: "field" },
          h("label", { for: "question", class: "hidden" }, "Your question"),
          this.field,
          this.button,
        ),
        h("p", { class: "faint hint" }, "A small local model can be wrong. Its sources are below each answer."),
      ),
    );
    this.showButton();
    this.clear();
  }

  /** Begin a new conversation. */
  clear(): void {
    this.running?.abort();
    this.turns = [];
    clear(this.thread, this.welcome());
    this.field.value = "";
    this.resize();
  }

  focus(): void {
    this.resize();
    this.field.focus();
  }

  private welcome(): HTMLElement {
    const { about } = this;
    if (about.num_chunks === 0) {
      return emptyPlace(
        "This index has no documents yet",
        h("p", {}, "Add a folder of text, Markdown, HTML, PDF or Word files, then load this page again:"),
        h("pre", {}, `kvrag ingest FOLDER --index ${about.index}`),
      );
    }
    return emptyPlace(
      `Ask ${about.index}`,
      h(
        "p",
        {},
        `${about.model} answers from ${count(about.num_documents, "document")}, and shows the passages that it read.`,
      ),
    );
  }

  private press(): void {
    if (this.running) this.running.abort();
    else this.send();
  }

  private send(): void {
    const question = this.field.value.trim();
    if (!question) {
      this.field.focus();
      return;
    }
    this.field.value = "";
    this.resize();
    const turn: Turn = { question, answer: "", finish: "failed", citations: [] };
    const view = new TurnView(turn);
    if (this.turns.length === 0) clear(this.thread);
    this.turns.push(view);
    this.thread.append(view.element);
    view.element.scrollIntoView({ block: "start" });
    void this.answer(view);
  }

  private async answer(view: TurnView): Promise<void> {
    if (this.running) return;
    const running = new AbortController();
    this.running = running;
    this.showButton();
    this.announce("Searching and reading");
    view.begin();
    const maxTokens = this.about.max_tokens;
    try {
      await this.read(view, running.signal, maxTokens);
      view.end(maxTokens);
      this.announce(`Answer complete: ${view.turn.answer}`);
    } catch (error) {
      if (running.signal.aborted) {
        view.turn.finish = "stopped";
        view.end(maxTokens);
        this.announce("Answer stopped");
      } else if (error instanceof Problem) {
        view.fail(error, () => void this.answer(view));
      } else {
        throw error;
      }
    } finally {
      if (this.running === running) this.running = null;
      this.showButton();
    }
  }

  private async read(view: TurnView, signal: AbortSignal, maxTokens: number): Promise<void> {
    const { turn } = view;
    for await (const event of ask(this.about.rag, this.messages(view), maxTokens, {}, signal)) {
      const [choice] = event.choices;
      if (!choice) continue;
      if (choice.delta.content) {
        view.add(choice.delta.content);
        this.follow();
      }
      if (choice.delta.annotations) {
        turn.citations = choice.delta.annotations.map((one: any) => one.url_citation);
      }
      if (choice.finish_reason) turn.finish = choice.finish_reason;
    }
  }

  /** The conversation up to a question. Questions without an answer are left out. */
  private messages(view: TurnView): Message[] {
    const earlier = this.turns.slice(0, this.turns.indexOf(view)).filter((one) => one.turn.answer);
    const said: Message[] = this.about.is_chat
      ? earlier.flatMap(({ turn }) => [
          { role: "user" as const, content: turn.question },
          { role: "assistant" as const, content: turn.answer },
        ])
      : [];
    return [...said, { role: "user", content: view.turn.question }];
  }

  /** Keep the end of the answer in sight, unless the person has scrolled away from it. */
  private follow(): void {
    const end = this.thread.scrollHeight - this.thread.clientHeight - this.thread.scrollTop;
    if (end < 80) this.thread.scrollTop = this.thread.scrollHeight;
  }

  private showButton(): void {
    const label = this.running ? "Stop" : "Ask";
    this.button.setAttribute("aria-label", label);
    this.button.title = label;
    this.button.classList.toggle("stops", this.running !== null);
    clear(this.button, icon(this.running ? ICONS.stop : ICONS.send));
  }

  private resize(): void {
    this.field.style.height = "auto";
    const wanted = this.field.scrollHeight; // 0 before the page shows it
    if (wanted > 0) this.field.style.height = `${Math.min(wanted, 200)}px`;
  }
}
