"""Play with a model: a server and a page that explain images as they are dropped. See docs/explorer.md."""
