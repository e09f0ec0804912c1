// Numbers as text.

const percent = new Intl.NumberFormat("en", { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1 });
const integer = new Intl.NumberFormat("en");

function probabilityText(value) {
  if (typeof value !== "number") return "";
  if (value > 0 && value < 0.001) return "< 0.1%";
  if (value < 1 && value > 0.999) return "> 99.9%";
  return percent.format(value);
}

/** Format a number with three digits, for colour bars and scores. */
function shortNumber(value) {
  if (typeof value !== "number") return "";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replaceAll("-", "−").replace("e+", "e");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** Return the options of a method as text; a space after their names keeps them apart from other facts. */
const settingsOf = (row) => Object.fromEntries(Object.entries(row.settings ?? {}).map(([name, value]) => [`${name} `, asText(value)]));

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Format a number with its standard error, if it has one. */
const plusMinus = (value, error) => [value, error].map(shortNumber).filter(Boolean).join(" ± ");

/** Return the shares of the inputs of a case, in the order of the call; empty for an image. */
const sharesText = (row) => Object.entries(row?.shares ?? {}).map(([name, share]) => `${name} ${Math.round(100 * share)} %`).join(", ");
