"""Which models run where, split how, replicated how often (AlpaServe, OSDI'23)."""
