// Numbers and places in words.

const whole = new Intl.NumberFormat("en");

export const count = (n, one, many = `${one}s`) => `${whole.format(n)} ${n === 1 ? one : many}`;
export const number = (n) => whole.format(n);
export const seconds = (s) => `${s.toFixed(s < 10 ? 2 : 1)} s`;

export function megabytes(bytes) {
  return `${Math.round(bytes / 100_000) / 10}\u00a0MB`;
}

export function pages(first, last) {
  if (first === null) return "";
  return first === last ? `page ${first}` : `pages ${first} to ${last}`;
}

// What served a prompt, in one line.
export function served({ ttft_s, usage, served: kv }) {
  const { prompt_tokens, cached_tokens } = usage;
  const parts = [
    `TTFT ${seconds(ttft_s)}`,
    cached_tokens
      ? `${number(cached_tokens)} of ${number(prompt_tokens)} prompt tokens from the cache`
      : `${number(prompt_tokens)} prompt tokens, none from the cache`,
  ];
  if (kv?.span_tokens) {
    parts[1] += `, ${number(kv.span_tokens)} of them compressed into ${count(kv.span_slots, "slot")}`;
    if (kv.quality !== null) parts.push(`quality ${kv.quality.toFixed(2)}`);
  }
  return parts.join("; ");
}
