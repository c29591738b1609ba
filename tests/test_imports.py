"""What imports what: no circles, which import-linter's layers cannot see inside a room."""

from graphlib import TopologicalSorter

import grimp


def test_no_modules_import_each_other():
    graph = grimp.build_graph("hasten", exclude_type_checking_imports=True)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imported).prepare()  # CycleError names the circle
