// How to answer: the policy of repair, how much of it, and how many passages to read.

import type { About, Options } from "./api";
import { h } from "./dom";

const RATIOS = [0.05, 0.1, 0.15, 0.25, 0.5, 1];

export class Settings {
  readonly element: HTMLElement;
  private readonly policy: HTMLSelectElement;
  private readonly ratio: HTMLSelectElement;
  private readonly passages: HTMLInputElement;
  private readonly summary = h("summary", {});

  constructor(private readonly about: About) {
    const changed = () => this.show();
    const names = [...new Set([about.policy, ...about.policies])];
    this.policy = h(
      "select",
      { id: "policy", onchange: changed },
      ...names.map((name) => h("option", { value: name }, name)),
    );
    this.ratio = h(
      "select",
      { id: "ratio", onchange: changed },
      h("option", { value: "" }, "the policy's own"),
      ...RATIOS.map((one) => h("option", { value: one }, `${one * 100} %`)),
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
        { class: "controls" },
        h("label", {}, "Repair policy", this.policy),
        h("label", {}, "Reused tokens to repair", this.ratio),
        h("label", {}, "Passages to read", this.passages),
      ),
    );
    this.show();
  }

  /** What a request says; fields at the server's defaults are left out. */
  get options(): Options {
    const options: Options = {};
    const k = Math.round(Number(this.passages.value));
    if (this.policy.value !== this.about.policy) options.policy = this.policy.value;
    if (this.ratio.value && this.policy.value !== "none") options.ratio = Number(this.ratio.value);
    if (k >= 1 && k <= 100 && k !== this.about.top_k) options.k = k;
    return options;
  }

  /** The settings in a few words. */
  get words(): string {
    const { ratio, k } = this.options;
    const parts = [this.policy.value];
    if (ratio !== undefined) parts.push(`${ratio * 100} %`);
    parts.push(`${k ?? this.about.top_k} passages`);
    return parts.join(", ");
  }

  private show(): void {
    this.ratio.disabled = this.policy.value === "none";
    this.summary.textContent = `How to answer: ${this.words}`;
  }
}
