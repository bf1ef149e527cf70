// A click on a column's name sorts its table by it; a second one turns the order around.
(() => {
  const key = (cell) => {
    const given = cell.dataset.v ?? cell.textContent.replace(/,/g, "");
    const number = parseFloat(given);
    return Number.isNaN(number) ? given : number;
  };
  const order = (a, b) => {
    const [left, right] = [typeof a === "number", typeof b === "number"];
    if (left && right) return a - b;
    if (left !== right) return left ? -1 : 1;
    return a.localeCompare(b);
  };
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const body = head.closest("table").tBodies[0];
      const column = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
      rows.sort(([a], [b]) => (down ? order(b, a) : order(a, b)));
      body.append(...rows.map(([, row]) => row));
    });
  }
})();
