"""report.html: a run as one page that stands alone."""
