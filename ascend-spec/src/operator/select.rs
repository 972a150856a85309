//! The arguments that one version of an operator has.

/// Passes the arguments of a declaration that a version of the operator has to the macro `then`, after the tokens
/// `with`.
///
/// `arguments_of_version! { {2 then with} table }` becomes `then! { with rows of version 2, without their versions }`.
#[doc(hidden)]
#[macro_export]
macro_rules! arguments_of_version {
    ({ $version:tt $then:ident $with:tt } $($table:tt)*) => {
        $crate::arguments_of_version! { @ $version $then $with [] $($table)* }
    };
    (@ $version:tt $then:ident $with:tt [$($kept:tt)*]) => { $then! { $with $($kept)* } };
    // An argument that a newer version added is dropped.
    (@ 1 $t:ident $w:tt $k:tt 2 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 1 $t:ident $w:tt $k:tt 3 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 1 $t:ident $w:tt $k:tt 4 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 1 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 2 $t:ident $w:tt $k:tt 3 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 2 $t $w $k $($rest)* } };
    (@ 2 $t:ident $w:tt $k:tt 4 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 2 $t $w $k $($rest)* } };
    (@ 2 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 2 $t $w $k $($rest)* } };
    (@ 3 $t:ident $w:tt $k:tt 4 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 3 $t $w $k $($rest)* } };
    (@ 3 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 3 $t $w $k $($rest)* } };
    (@ 4 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 4 $t $w $k $($rest)* } };
    (@ $version:tt $t:ident $w:tt [$($kept:tt)*] $since:tt $row:tt $($rest:tt)*) => {
        $crate::arguments_of_version! { @ $version $t $w [$($kept)* $row] $($rest)* }
    };
}
