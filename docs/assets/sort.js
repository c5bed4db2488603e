// A click on the head of a table sorts its rows: a column of numbers by them, any other by its text.
// Empty cells stay last.
"use strict";
(() => {
  const textOf = (row, column) => (row.cells[column] ? row.cells[column].textContent : "").trim();
  const numberOf = (text) => {
    const found = text.match(/^[+\-\u2212]?\d[\d,]*\.?\d*/); // "1 to 3", "1.85x", "0.9 ± 0.1"
    return found ? Number(found[0].replace("\u2212", "-").replace(/,/g, "")) : null;
  };
  const sortRows = (body, column, isUp) => {
    const rows = [...body.rows].map((row) => ({ row, text: textOf(row, column) }));
    const known = rows.filter((one) => one.text && one.text !== "-"), empty = rows.filter((one) => !known.includes(one));
    const isNumeric = known.every((one) => numberOf(one.text) !== null);
    known.sort((a, b) => (isUp ? 1 : -1) *
      (isNumeric ? numberOf(a.text) - numberOf(b.text) : a.text.localeCompare(b.text, "en", { numeric: true })));
    body.append(...[...known, ...empty].map((one) => one.row));
  };
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < 4) continue;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const sort = () => {
        const isUp = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((one) => one.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        sortRows(table.tBodies[0], column, isUp);
      };
      head.setAttribute("aria-sort", "none");
      head.tabIndex = 0;
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  }
})();
