// Makes tables and code that scroll sideways reachable with the keyboard.
function makeFocusable() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else if (box.matches(".md-typeset__scrollwrap")) box.removeAttribute("tabindex");
  }
}

window.addEventListener("load", () => {
  makeFocusable();
  window.addEventListener("resize", makeFocusable);
});
