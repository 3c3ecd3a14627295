"""The site of the documents: what ``make docs`` builds."""
