// A click on the head of a table sorts its rows: by the first number of a cell, else by its text.
"use strict";
(() => {
  const key = (row, column) => {
    const text = (row.cells[column] ? row.cells[column].textContent : "").trim();
    const found = text.match(/^[^\d-]*(-?\d[\d,]*\.?\d*)/);
    return found ? [0, Number(found[1].replace(/,/g, "")), text] : [1, 0, text];
  };
  const compare = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2].localeCompare(b[2]);
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < 4) continue;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const sort = () => {
        const isUp = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((one) => one.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
        rows.sort((a, b) => (isUp ? 1 : -1) * compare(a[0], b[0]));
        table.tBodies[0].append(...rows.map((pair) => pair[1]));
      };
      head.setAttribute("aria-sort", "none");
      head.tabIndex = 0;
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  }
})();
