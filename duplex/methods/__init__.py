"""Methods that recognise compositions, one module per kind; all of them read cached encoder outputs."""
