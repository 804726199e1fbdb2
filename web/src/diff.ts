// Two answers side by side, with the words marked in which they differ.

import { h } from "./dom";

/** Words that two texts share, by the longest common subsequence: for each word, whether it is. */
export function sharedWords(one: string[], other: string[]): [boolean[], boolean[]] {
  const rows = one.length + 1;
  const columns = other.length + 1;
  const lengths = new Uint16Array(rows * columns);
  for (let i = one.length - 1; i >= 0; i -= 1) {
    for (let j = other.length - 1; j >= 0; j -= 1) {
      lengths[i * columns + j] =
        one[i] === other[j]
          ? lengths[(i + 1) * columns + j + 1] + 1
          : Math.max(lengths[(i + 1) * columns + j], lengths[i * columns + j + 1]);
    }
  }
  const inOne: boolean[] = Array(one.length).fill(false);
  const inOther: boolean[] = Array(other.length).fill(false);
  for (let i = 0, j = 0; i < one.length && j < other.length; ) {
    if (one[i] === other[j]) {
      inOne[i++] = inOther[j++] = true;
    } else if (lengths[(i + 1) * columns + j] >= lengths[i * columns + j + 1]) {
      i += 1;
    } else {
      j += 1;
    }
  }
  return [inOne, inOther];
}

export interface Version {
  label: string;
  text: string;
  note: string;
}

// Longer answers are compared up to here, so that the table of lengths stays small.
const MOST_WORDS = 2000;

export function comparison(one: Version, other: Version): HTMLElement {
  const [words, others] = [one, other].map(({ text }) =>
    text.split(/\s+/).filter(Boolean).slice(0, MOST_WORDS),
  );
  const [inOne, inOther] = sharedWords(words, others);
  const differing = [...inOne, ...inOther].filter((isShared) => !isShared).length;
  return h(
    "section",
    { class: "comparison" },
    h("h3", {}, differing === 0 ? "Both answers are the same, word by word" : `Two answers; words in one alone are marked`),
    h("div", { class: "versions" }, version(one, words, inOne), version(other, others, inOther)),
  );
}

function version({ label, note }: Version, words: string[], isShared: boolean[]): HTMLElement {
  const text = h("p", {});
  words.forEach((word, at) => {
    text.append(isShared[at] ? word : h("mark", { class: "differs" }, word), " ");
  });
  return h(
    "div",
    { class: "version" },
    h("p", { class: "version-label" }, h("b", {}, label), h("span", { class: "faint" }, note)),
    text,
  );
}
