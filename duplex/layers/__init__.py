"""Neural modules, closed-form fits and score formulas from which the methods in `duplex.methods` are built."""
