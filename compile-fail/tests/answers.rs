//! No case compiles, and the compiler says of each what it should.

#[test]
fn none_compiles() {
    trybuild::TestCases::new().compile_fail("cases/*.rs");
}
