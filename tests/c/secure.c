/* The copies of libc_sec.so that programs written for CANN call. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* As the header that such programs bring along declares them. */
int memcpy_s(void *dest, size_t room, const void *src, size_t count);
int memmove_s(void *dest, size_t room, const void *src, size_t count);
int memset_s(void *dest, size_t room, int byte, size_t count);
int strcpy_s(char *dest, size_t room, const char *src);
int strncpy_s(char *dest, size_t room, const char *src, size_t count);
int strcat_s(char *dest, size_t room, const char *src);

static int failures = 0;

static void check(int right, const char *what)
{
    if (!right) {
        fprintf(stderr, "wrong: %s\n", what);
        ++failures;
    }
}

int main(void)
{
    char to[8] = "abcdefg";
    check(memcpy_s(to, sizeof to, "xyz", 3) == 0 && memcmp(to, "xyzdefg", 8) == 0, "a copy");
    check(memmove_s(to, sizeof to, to + 1, 6) == 0 && memcmp(to, "yzdefgg", 8) == 0, "a move");
    check(memcpy_s(to, sizeof to, to + 1, 6) == 182 && to[0] == 0 && to[7] == 0, "an overlap");
    check(memcpy_s(to, sizeof to, to, 8) == 0, "a copy to itself");
    memset(to, 'a', sizeof to);
    check(memcpy_s(to, 4, "123456", 6) == 162 && memcmp(to, "\0\0\0\0aaaa", 8) == 0, "no room");
    check(memcpy_s(to, 0, "1", 1) == 34 && memcpy_s(NULL, 1, "1", 1) == 22, "nowhere");
    check(memcpy_s(to, sizeof to, NULL, 1) == 150 && to[7] == 0, "nothing");
    check(memset_s(to, sizeof to, 'b', 4) == 0 && memcmp(to, "bbbb\0\0\0\0", 8) == 0, "a fill");
    check(memset_s(to, 4, 'c', 9) == 162 && memcmp(to, "cccc\0\0\0\0", 8) == 0, "a fill without room");

    check(strcpy_s(to, sizeof to, "seven c") == 0 && strcmp(to, "seven c") == 0, "a text that just fits");
    check(strcpy_s(to, sizeof to, "eight ch") == 162 && to[0] == 0, "a text that does not");
    check(strcpy_s(to, sizeof to, "abc") == 0 && strcat_s(to, sizeof to, "def") == 0 && strcmp(to, "abcdef") == 0,
          "two texts");
    check(strcat_s(to, sizeof to, "gh") == 162 && to[0] == 0, "two texts without room");
    check(strncpy_s(to, sizeof to, "abcdefghijkl", 3) == 0 && strcmp(to, "abc") == 0, "a part of a text");
    check(strcpy_s(to, sizeof to, to + 1) == 182 && to[0] == 0, "a text over itself");
    check(strcpy_s(to, sizeof to, NULL) == 150, "no text");
    if (failures != 0) {
        return 1;
    }
    puts("done");
    return 0;
}
