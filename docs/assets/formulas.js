// Formulas arrive as \(...\) and \[...\]; KaTeX draws them, once per page that is shown.
const draw = () => renderMathInElement(document.body, {
  delimiters: [
    { left: "\\[", right: "\\]", display: true },
    { left: "\\(", right: "\\)", display: false },
  ],
});
document.addEventListener("DOMContentLoaded", draw);
