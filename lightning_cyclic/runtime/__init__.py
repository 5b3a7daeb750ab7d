"""Run a program with torch: stages, versions, transports and the engine; no Lightning here."""
