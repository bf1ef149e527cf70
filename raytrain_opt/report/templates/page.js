// A click on the name of a column sorts its table; a second click reverses the order.
(() => {
  const key = (cell) => {
    const value = cell.dataset.v ?? cell.textContent.replace(/,/g, "");
    const number = parseFloat(value);
    return Number.isNaN(number) ? value : number;
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
