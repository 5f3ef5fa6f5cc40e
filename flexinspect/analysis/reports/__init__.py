"""Reports of a trace's findings: in a terminal, as JSON, SARIF and JUnit XML."""
