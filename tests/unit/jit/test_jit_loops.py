"""The way around a kernel's hot loop, on made-up machine code."""

from sageattention3.kernels.jit.loops import count_hot_loop
from sageattention3.kernels.jit.sass import Instruction


def code(*lines: str) -> list[Instruction]:
    """Instructions written as "@P0 BRA 5", branch targets counted in instructions."""
    found = []
    for line in lines:
        words = line.split()
        predicate = words.pop(0) if words[0].startswith("@") else ""
        opcode, operands = words[0], " ".join(words[1:])
        if opcode.startswith("BRA"):
            *before, target = operands.split(",")
            operands = ",".join([*before, hex(int(target) * 16)])
        found.append(Instruction(predicate, opcode, operands))
    return found


def test_code_without_matrix_products_has_no_hot_loop():
    assert count_hot_loop(code("FADD", "@P0 BRA 0", "EXIT")) == {}
    assert count_hot_loop(code("OMMA", "EXIT")) == {}


def test_a_loop_is_counted_from_its_head_to_its_branch_back_nops_included():
    found = count_hot_loop(code("MOV", "OMMA", "NOP", "@P0 BRA 1", "FADD", "EXIT"))
    assert found == {"OMMA": 1, "NOP": 1, "BRA": 1}


def test_the_shortest_way_that_leaves_out_no_product_is_taken():
    found = count_hot_loop(
        code(
            "OMMA",
            "@!P0 BRA 4",  # past a slow path
            "FMUL",
            "FMUL",
            "@P1 BRA 6",  # past a product: not taken
            "OMMA",
            "@P2 BRA 0",
            "EXIT",
        )
    )
    assert found == {"OMMA": 2, "BRA": 3}


def test_of_two_loops_the_one_with_more_products_counts():
    lines = ["OMMA", "@P0 BRA 0", "OMMA", "OMMA", "@P0 BRA 2", "EXIT"]
    assert count_hot_loop(code(*lines))["OMMA"] == 2


def test_branches_may_be_conditional_by_operand_and_lead_out_of_the_loop():
    lines = ["OMMA", "BRA.U !UP0,5", "FADD", "BRA.U UP1,0", "EXIT", "FMUL", "BRA 2"]
    assert count_hot_loop(code(*lines)) == {"OMMA": 1, "BRA.U": 2, "FADD": 1}


def test_a_wait_that_spins_is_passed_once():
    lines = ["SYNCS", "@!P0 BRA 0", "OMMA", "@P1 BRA 0", "EXIT"]
    assert count_hot_loop(code(*lines)) == {"SYNCS": 1, "BRA": 2, "OMMA": 1}


def test_a_wait_that_spins_behind_the_end_is_no_loop_of_its_own():
    lines = ["SYNCS", "@!P0 BRA 5", "OMMA", "@P1 BRA 0", "EXIT", "SYNCS", "@P0 BRA 2", "BRA 5"]
    assert count_hot_loop(code(*lines)) == {"SYNCS": 1, "BRA": 2, "OMMA": 1}
