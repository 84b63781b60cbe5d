"""What a table of position codes is, asked of the function that makes it."""

from posenc.audit.tables.checking import check_table as check_table
