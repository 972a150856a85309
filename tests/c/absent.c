/*
 * A library that calls an operator which the emulation lacks (with CLIENT), and the program that uses it: prints what
 * the operator answers, and whether it is found by its name in CANN's library.
 */
#include <stdint.h>

#ifdef CLIENT

int aclnnNoSuchOperatorGetWorkspaceSize(const void *self, void *out, uint64_t *workspaceSize, void **executor);
int aclnnInit(const char *configPath);

int call_operator(void)
{
    uint64_t bytes = 0;
    void *executor = 0;
    aclnnInit(0);
    return aclnnNoSuchOperatorGetWorkspaceSize(0, 0, &bytes, &executor);
}

#else

#include <dlfcn.h>
#include <stdio.h>

#include "acl/acl.h"

int call_operator(void);

int main(void)
{
    void *library = dlopen("libopapi.so", RTLD_LAZY);
    void *function = dlsym(library, "aclnnNoSuchOperatorGetWorkspaceSize");
    int status = 0;
    printf("library %d function %d\n", library != NULL, function != NULL);
    fflush(stdout);
    status = call_operator();
    printf("%d %s\n", status, aclGetRecentErrMsg());
    printf("done\n");
    return 0;
}

#endif
