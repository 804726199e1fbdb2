// How to answer: one slider from the fastest way to full prefill; policies are among the details.

import type { About, Effort, Options } from "./api";
import { count, h, seconds } from "./dom";

export class Settings {
  readonly element: HTMLElement;
  private readonly slider: HTMLInputElement;
  private readonly policy: HTMLSelectElement;
  private readonly passages: HTMLInputElement;
  private readonly summary = h("summary", {});
  private readonly cost = h("output", { class: "faint", for: "effort" });

  constructor(private readonly about: About) {
    const changed = () => this.show();
    const usual = about.efforts.findIndex(({ options }) => Object.keys(options).length === 0);
    this.slider = h("input", {
      id: "effort",
      type: "range",
      min: 0,
      max: about.efforts.length - 1,
      value: usual,
      "aria-label": "From faster to closest to full prefill",
      oninput: changed,
    });
    const names = [...new Set([about.policy, ...about.policies])];
    this.policy = h(
      "select",
      { id: "policy", onchange: changed },
      ...names.map((name) => h("option", { value: name }, name)),
    );
    this.passages = h("input", {
      id: "passages",
      type: "number",
      min: 1,
      max: 100,
      value: about.top_k,
      onchange: changed,
    });
    this.element = h(
      "details",
      { class: "settings" },
      this.summary,
      h(
        "div",
        { class: "effort" },
        h("span", { "aria-hidden": "true" }, "Faster"),
        this.slider,
        h("span", { "aria-hidden": "true" }, "Closest to full prefill"),
      ),
      this.cost,
      h(
        "details",
        { class: "fold" },
        h("summary", {}, "Details"),
        h(
          "div",
          { class: "controls" },
          h("label", {}, "Repair policy", this.policy),
          h("label", {}, "Passages to read", this.passages),
        ),
      ),
    );
    this.show();
  }

  private get effort(): Effort {
    return this.about.efforts[Number(this.slider.value)];
  }

  /** Whether the slider, and not the policy, says what happens. */
  private get isAtAnEnd(): boolean {
    const { policy, reuse } = this.effort.options;
    return policy === "none" || reuse === false;
  }

  /** What a request says; fields at the server's defaults are left out. */
  get options(): Options {
    const options: Options = { ...this.effort.options };
    const k = Math.round(Number(this.passages.value));
    if (!this.isAtAnEnd && this.policy.value !== this.about.policy) options.policy = this.policy.value;
    if (options.policy === "none") delete options.ratio;
    if (k >= 1 && k <= 100 && k !== this.about.top_k) options.k = k;
    return options;
  }

  /** The settings in a few words. */
  get words(): string {
    const { policy, k } = this.options;
    const named = policy && policy !== "none" ? `, ${policy}` : "";
    return `${this.way}${named}, ${count(k ?? this.about.top_k, "passage")}`;
  }

  private get way(): string {
    const { policy, ratio, reuse } = this.options;
    if (reuse === false) return "full prefill";
    if (policy === "none") return "stored text as it is";
    return ratio === undefined ? "balanced" : `${ratio * 100} % computed again`;
  }

  private show(): void {
    const { efforts, top_k } = this.about;
    const full = efforts[efforts.length - 1].seconds;
    const own = this.effort.seconds;
    this.policy.disabled = this.isAtAnEnd;
    this.summary.textContent = `How to answer: ${this.words}`;
    this.slider.setAttribute("aria-valuetext", this.way);
    this.cost.textContent =
      own === null || full === null
        ? "What this costs is measured with the first answers."
        : `Computing ${count(top_k, "passage")} takes about ${rounded(own)} on this machine` +
          (own < full ? `, and ${rounded(full)} in full.` : ".");
  }
}

function rounded(value: number): string {
  return seconds(Number(value.toPrecision(2)));
}
