"""Methods that recognise compositions, one module per kind; they all work on cached encoder outputs."""
