// Dark or light theme: the theme of the system until the user chooses one.

function storedSetting(name, value, storage = "localStorage") {
  // Browsers may deny storage to a page opened as a file.
  try {
    if (value !== undefined) window[storage].setItem(name, value);
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

/** Let a button change the theme of a root element. */
function connectTheme(root, button) {
  const darkSystem = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (darkSystem.matches ? "dark" : "light")) === "dark";
  const show = () => button.setAttribute("aria-pressed", isDark());
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    storedSetting("saliency-theme", root.dataset.theme);
    show();
  });
  darkSystem.addEventListener("change", show);
  const stored = storedSetting("saliency-theme");
  if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  show();
}
