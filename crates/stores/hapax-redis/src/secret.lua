-- Compares the hash of the secret that names records with the stored one, which the first process
-- stored. The hash does not reveal the secret. Returns 1 if they are equal or there is none, 0 if they
-- differ, 2 if the hash was stored now, 3 if there is none and one is required.
--
-- KEYS[1]  name of the hash
-- ARGV[1]  expected hash
-- ARGV[2]  1 to store it if there is none, 2 to require one
local found = redis.pcall('GET', KEYS[1])
if type(found) == 'table' then
  return redis.error_reply('HAPAX ' .. found.err)
end
if found then
  return found == ARGV[1] and 1 or 0
end
if ARGV[2] == '2' then
  return 3
end
if ARGV[2] ~= '1' then
  return 1
end
local done = redis.pcall('SET', KEYS[1], ARGV[1])
if done.err then
  return redis.error_reply('NOTWRITTEN ' .. done.err)
end
return 2
