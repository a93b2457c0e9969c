// Formatting of numbers. Text goes into the page only as text, never as HTML: records are untrusted.

export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  for (const child of children) if (child !== null && child !== undefined) made.append(child);
  return made;
}

export function withoutDomain(host) {
  return /^[\d.:]+$/.test(host) ? host : host.split(".")[0];
}

export function digits(value, most = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  return value.toFixed(Math.max(0, Math.min(6, most - 1 - size)));
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  const all = 100 * value;
  if (all === 0) return "0 %";
  if (all < 0.01) return "<0.01 %";
  return (all >= 9.95 ? all.toFixed(0) : all >= 0.995 ? all.toFixed(1) : all.toFixed(2)) + " %";
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.9995e-3) return digits(value * 1e6, 2) + " µs";
  if (value < 0.9995) return digits(value * 1e3) + " ms";
  return value < 100 ? digits(value) + " s" : value < 7200 ? Math.round(value / 60) + " min" : digits(value / 3600, 2) + " h";
}

export function rate(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const bits = 8 * bytes;
  for (const [scale, unit] of [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]]) if (bits >= scale) return digits(bits / scale) + " " + unit;
  return digits(bits) + " bit/s";
}

export function shortRate(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const bits = 8 * bytes;
  for (const [scale, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (bits >= scale) return digits(bits / scale, 2) + unit;
  return digits(bits, 2);
}

export function size(bytes) {
  for (const [scale, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) if (bytes >= scale) return digits(bytes / scale) + " " + unit;
  return bytes + " B";
}

export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
