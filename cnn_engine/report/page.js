// Sorting and searching of long tables. The page says all that it has to without it.
"use strict";

const SCALES = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, PB: 1e15 };

// The number that a cell shows, as cnn_engine.report.units writes it; NaN for none.
function value(text) {
  const found = text.match(/^[<>(]*(-?[\d,.]+(?:e[+-]?\d+)?)\s*([a-zA-Z]*)/);
  return found ? parseFloat(found[1].replaceAll(",", "")) * (SCALES[found[2]] ?? 1) : NaN;
}

// The cells of a row by column: one that spans several stands in each.
function cells(row) {
  return [...row.cells].flatMap((cell) => Array(cell.colSpan).fill(cell));
}

function sortable(table) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const body = table.tBodies[0];
  const rows = [...body.rows].filter((row) => !row.classList.contains("sum"));
  const order = new Map(rows.map((row, index) => [row, index]));
  const sum = body.querySelector("tr.sum");
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.textContent = head.textContent;
    const above = table.tHead.rows.length > 1 && column ? cells(table.tHead.rows[0])[column] : null;
    if (above) button.setAttribute("aria-label", `${head.textContent}, ${above.textContent}`);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      // First the largest (names: the first), then the other way, then as the network has them.
      const first = column ? "descending" : "ascending";
      const then = column ? "ascending" : "descending";
      const next = before === null ? first : before === first ? then : null;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (next) head.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1;
      const key = new Map(rows.map((row) => [row, cells(row)[column].textContent.trim()]));
      const compared = (a, b) => {
        if (!next) return order.get(a) - order.get(b);
        const [x, y] = [value(key.get(a)), value(key.get(b))];
        if (!column || (isNaN(x) && isNaN(y))) {
          return sign * key.get(a).localeCompare(key.get(b), "en", { numeric: true }) || order.get(a) - order.get(b);
        }
        // Rows without a number come last, whichever way.
        return isNaN(x) - isNaN(y) || sign * (x - y) || order.get(a) - order.get(b);
      };
      rows.sort(compared).forEach((row) => body.insertBefore(row, sum));
    });
  });
}

function searchable(table) {
  const rows = [...table.tBodies[0].rows].filter((row) => !row.classList.contains("sum"));
  const field = document.createElement("p");
  const input = document.createElement("input");
  const found = document.createElement("output");
  const label = document.createElement("label");
  input.type = "search";
  input.id = `search-${table.id}`;
  label.htmlFor = input.id;
  label.textContent = "Search layers";
  found.htmlFor = input.id;
  field.className = "search";
  field.append(label, " ", input, " ", found);
  table.parentElement.before(field);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    found.textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
}

for (const table of document.querySelectorAll("table.sortable")) sortable(table);
for (const table of document.querySelectorAll("table.searchable")) searchable(table);
