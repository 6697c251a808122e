"""What goes into the next step (SARATHI): block accounting and batch composition, without tensors or clocks."""
