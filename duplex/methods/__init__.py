"""Methods that recognise compositions, one module a kind; all read cached encoder outputs."""
